"""Token ids to text, one piece at a time, never half a character.

``TokenTable`` owns the bytes of every token, worked out once from the tokenizer; ``IncrementalDecoder`` owns the bytes
that are not yet a character. A stream costs O(1) per token: bytes are appended and decoded once, nothing is decoded
again, and no text of the prompt is ever touched. The joined pieces equal the decoding of all ids at once, whatever the
cuts. Ids beyond the table and special tokens have no text.

Supported decoders are those of the supported model families: byte-level BPE (SmolLM2, Llama 3, Qwen) and
SentencePiece style with byte fallback (Llama 2, Mistral), whose leading space is kept, because an answer continues a
prompt. Invalid bytes become U+FFFD, one for each maximal ill-formed part (Unicode 15, section 3.9).
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer

from kvstore.errors import EnvironmentProblem

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_METASPACE = "▁"


class TokenTable:
    """The bytes that each token id contributes to the text. Immutable; shared by all streams."""

    def __init__(self, text_bytes: Sequence[bytes], special: dict[int, str]) -> None:
        """``text_bytes[id]`` is empty for special tokens, whose names are in ``special``."""
        self._text_bytes = tuple(text_bytes)
        self._special = dict(special)
        self.special_names = frozenset(special.values())
        self.longest_token_bytes = max((len(piece) for piece in self._text_bytes), default=1)

    def __len__(self) -> int:
        return len(self._text_bytes)

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> TokenTable:
        """Reads vocabulary, added tokens and decoder.

        Raises: EnvironmentProblem when the decoder is of a kind that is not supported.
        """
        to_bytes = _converter(tokenizer)
        added: dict[int, Any] = tokenizer.get_added_tokens_decoder()
        vocab = tokenizer.get_vocab(with_added_tokens=False)
        size = 1 + max([*vocab.values(), *added], default=-1)
        pieces = [b""] * size
        for token, token_id in vocab.items():
            pieces[token_id] = to_bytes(token)
        special = {}
        for token_id, token in added.items():
            pieces[token_id] = b"" if token.special else to_bytes(token.content)
            if token.special:
                special[token_id] = token.content
        return cls(pieces, special)

    def text_bytes(self, token_id: int) -> bytes:
        """Returns what the token adds to the text; empty for special tokens and ids beyond the table."""
        return self._text_bytes[token_id] if 0 <= token_id < len(self._text_bytes) else b""

    def join(self, token_ids: Iterable[int]) -> bytes:
        """Returns the bytes of several tokens in a row."""
        return b"".join(map(self.text_bytes, token_ids))

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the token's own bytes, a special token's name included; for logprobs, not for text."""
        name = self._special.get(token_id)
        return name.encode() if name is not None else self.text_bytes(token_id)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Returns the text of all ids at once."""
        return self.join(token_ids).decode("utf-8", "replace")


class IncrementalDecoder:
    """UTF-8 decoding of a stream of bytes cut anywhere."""

    def __init__(self) -> None:
        self._pending = b""

    @property
    def num_pending_bytes(self) -> int:
        """Bytes held back because they may become a character: 0 to 3."""
        return len(self._pending)

    def push(self, data: bytes) -> str:
        """Takes bytes in and returns the characters that are complete now."""
        if self._pending:
            data = self._pending + data
        text, num_consumed = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[num_consumed:]
        return text

    def flush(self) -> str:
        """Ends the stream: a fragment that is left becomes U+FFFD."""
        text, _ = codecs.utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        return text

    def check_invariants(self) -> None:
        """Raises AssertionError when more is held back than the start of one character."""
        assert len(self._pending) <= 3, self._pending


def _converter(tokenizer: Tokenizer) -> Any:
    """Returns the function from a token's name in the vocabulary to its bytes."""
    decoder: Any = tokenizer.decoder
    spec: Any = json.loads(decoder.__getstate__()) if decoder is not None else {"type": "none"}
    parts = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"]:
        return _byte_level
    if set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return _sentence_piece
    raise EnvironmentProblem(f"the tokenizer's decoder ({', '.join(kinds)}) is not supported")


def _byte_level_alphabet() -> dict[int, int]:
    """Returns the byte that each character of a byte-level vocabulary stands for.

    Printable Latin-1 characters stand for themselves, every other byte for a character from U+0100 on, in order.
    Source: the byte-to-unicode table of GPT-2's vocabulary.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {value: value for value in printable}
    others = (value for value in range(256) if value not in alphabet)
    return alphabet | {0x100 + shift: value for shift, value in enumerate(others)}


_ALPHABET = _byte_level_alphabet()
_ALPHABET_CHARS = frozenset(map(chr, _ALPHABET))


def _byte_level(token: str) -> bytes:
    """A token with a character outside the alphabet is plain text (an added token)."""
    if not _ALPHABET_CHARS.issuperset(token):
        return token.encode("utf-8", "replace")
    return token.translate(_ALPHABET).encode("latin-1")


def _sentence_piece(token: str) -> bytes:
    byte = _BYTE_TOKEN.match(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_METASPACE, " ").encode("utf-8", "replace")
