"""Incremental detokenising: joined pieces equal the text of all ids, whatever the ids and the cuts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from cluster.ingress.api.tokenizer import TokenizerBundle
from cluster.ingress.detokenize import IncrementalDecoder, TokenTable
from kvstore.errors import EnvironmentProblem

from .fakes import make_tokenizer

TOKENIZER = make_tokenizer()
TABLE = TokenTable.from_tokenizer(TOKENIZER)
NUM_IDS = TOKENIZER.get_vocab_size()


def pieces_of(table: TokenTable, token_ids: list[int]) -> list[str]:
    decoder = IncrementalDecoder()
    pieces = []
    for token_id in token_ids:
        pieces.append(decoder.push(table.text_bytes(token_id)))
        decoder.check_invariants()
    return [*pieces, decoder.flush()]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, NUM_IDS + 50), max_size=60))
def test_any_ids_decode_as_the_tokenizer_decodes_them(token_ids: list[int]) -> None:
    """F46: random ids (bad UTF-8, ids beyond the table) never raise and match the one-shot decoding."""
    known = [token_id for token_id in token_ids if token_id < NUM_IDS]
    assert "".join(pieces_of(TABLE, token_ids)) == TOKENIZER.decode(known, skip_special_tokens=True)
    assert TABLE.decode(token_ids) == TOKENIZER.decode(known, skip_special_tokens=True)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_text_survives_the_round_trip_and_no_piece_has_a_fragment(text: str) -> None:
    """UTF-8 of every kind comes back whole; U+FFFD appears only if it was in the text."""
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    pieces = pieces_of(TABLE, ids)
    assert "".join(pieces) == TOKENIZER.decode(ids)
    assert "".join(pieces).count("\ufffd") == text.count("\ufffd")


@pytest.mark.parametrize(
    "text", ["👩‍👩‍👧‍👦 family", "你好，世界", "e\u0301a\u200d\u200bz", "\u2028\u2029\x00\x7f", "🇩🇪"]
)
def test_emoji_cjk_and_joiners_are_held_back_whole(text: str) -> None:
    """No piece ends inside a character, and all of them together are the text."""
    pieces = pieces_of(TABLE, TOKENIZER.encode(text, add_special_tokens=False).ids)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_special_tokens_have_no_text_but_a_name() -> None:
    """Skipped in text, named in logprobs; an added token that is not special is text, spaces included."""
    end = TOKENIZER.token_to_id("<|im_end|>")
    call = TOKENIZER.token_to_id("<tool ☃>")
    assert TABLE.text_bytes(end) == b""
    assert TABLE.token_bytes(end) == b"<|im_end|>"
    assert TABLE.text_bytes(call) == "<tool ☃>".encode()
    assert TABLE.text_bytes(-1) == TABLE.text_bytes(10**18) == b""


def test_truncated_character_is_flushed_as_one_replacement() -> None:
    """Three of four bytes: one U+FFFD at the end."""
    decoder = IncrementalDecoder()
    assert decoder.push("😀".encode()[:3]) == ""
    assert decoder.num_pending_bytes == 3
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""


def make_sentence_piece() -> Any:
    """The decoder of Llama 2 and Mistral: metaspace, byte fallback, leading space stripped."""
    vocab = {"<unk>": 0, "<s>": 1, "▁Hello": 2, "▁world": 3, "!": 4} | {f"<0x{n:02X}>": 5 + n for n in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


def test_sentence_piece_with_byte_fallback() -> None:
    """Bytes make characters; the leading space is kept, because an answer continues a prompt."""
    tokenizer = make_sentence_piece()
    table = TokenTable.from_tokenizer(tokenizer)
    ids = [1, 2, 3, 4, *(5 + byte for byte in "☃".encode())]
    assert "".join(pieces_of(table, ids)) == " Hello world!☃"
    assert tokenizer.decode(ids) == "Hello world!☃"


def test_unsupported_decoder_is_refused_at_start() -> None:
    """A tokenizer that we would decode wrongly does not start."""
    tokenizer = Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(EnvironmentProblem, match="WordPiece"):
        TokenTable.from_tokenizer(tokenizer)


@pytest.mark.model
def test_packaged_tokenizer_decodes_random_ids_as_one_shot(model_folder: Path) -> None:
    """F46 on the real vocabulary: 300 random sequences, ids beyond the table among them."""
    import random

    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    table = TokenizerBundle.from_folder(model_folder).table
    assert len(table) == tokenizer.get_vocab_size()
    draw = random.Random(46)
    for _ in range(300):
        ids = [draw.randrange(len(table)) for _ in range(200)]
        expected = tokenizer.decode(ids, skip_special_tokens=True)
        assert "".join(pieces_of(table, ids)) == expected
        assert table.decode([*ids, len(table), 10**9]) == expected
