"""What a client writes is text, also when it looks like a control token of the model.

A chat template marks turns with special tokens. Were their names in a client's text tokenised as those tokens, a user
could end his own turn and speak as the system. Here such names are broken by a guard before the template sees them, so
that the only control tokens of a prompt are the template's; the guard is a special token of its own, in a copy of the
tokenizer that is made when it is first needed, and is taken out of the result. The text stays what the client wrote.

Owns the guard and the copy. Text without control names is never touched and costs one search.
"""

from __future__ import annotations

import re
import threading
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from kvstore.errors import BadInput

GUARD: Final = "\ufdd0kopir-guard\ufdd1"
"""Noncharacters of Unicode stand around it, so that no text has it by accident; whoever sends it loses it."""


class ControlText:
    """Breaks the control names in text and tokenises the result. Safe for use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().values()
        names = sorted((token.content for token in added if token.special), key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names))) if names else None
        self._lock = threading.Lock()
        self._guarded: Tokenizer | None = None

    def disarm(self, value: Any) -> Any:
        """Returns a text, or a structure of JSON with all of its texts, without control names.

        Raises: BadInput for a control token whose name is one character, which cannot be broken.
        """
        if isinstance(value, str):
            return self._disarm_text(value)
        if isinstance(value, list):
            return [self.disarm(item) for item in value]
        if isinstance(value, dict):
            return {self.disarm(name): self.disarm(item) for name, item in value.items()}
        return value

    def is_guarded(self, text: str) -> bool:
        """Whether ``encode`` is needed for this text."""
        return GUARD in text

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns the token ids of a text with guards; the first call copies the tokenizer (up to half a second)."""
        tokenizer = self._guarded_tokenizer()
        guard_id = tokenizer.token_to_id(GUARD)
        ids = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return [token_id for token_id in ids if token_id != guard_id]

    def _disarm_text(self, text: str) -> str:
        # Breaking one name can leave another (of "<<a>" and "<a>"); each round breaks at least one of all that overlap.
        while self._names is not None and self._names.search(text):
            text = self._names.sub(_broken, text)
        return text

    def _guarded_tokenizer(self) -> Tokenizer:
        with self._lock:
            if self._guarded is None:
                copy = Tokenizer.from_str(self._tokenizer.to_str())
                copy.add_special_tokens([AddedToken(GUARD, normalized=False, special=True)])
                self._guarded = copy
            return self._guarded


def _broken(found: re.Match[str]) -> str:
    name = found[0]
    if len(name) == 1:
        raise BadInput("messages", name, "is a control token of this model")
    return name[0] + GUARD + name[1:]
