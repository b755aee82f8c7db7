"""What a grammar lets a sequence say next.

``GuideFactory`` owns the tokenizer as the grammar library sees it and a bounded number of compiled grammars; ``Guide``
is the state of one sequence. The state is a function of the grammar and the tokens so far, so that any worker rebuilds
it: after a hand-over, and when a preempted stream comes back. It never chooses a token.

Compiling can take long for a large schema: ``prepare`` does it on any thread, ahead of time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from kvstore.core.messages import Grammar
from kvstore.errors import EnvironmentProblem, FatalError
from workers.sampling import Allowed

GRAMMARS_MAX: Final = 64


class Guide:
    """The grammar's state behind the tokens of one sequence."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def allowed(self) -> Allowed:
        """Returns which tokens may come next, bool (vocab_size,); the end token when the grammar is fulfilled.

        Raises: FatalError when the grammar is too complex at this place.
        """
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check("its next tokens cannot be worked out")
        return np.unpackbits(packed, bitorder="little")[: self._vocab_size].astype(bool)

    def consume(self, token_ids: Sequence[int]) -> None:
        """Goes on behind more tokens. Raises: FatalError when the grammar does not allow them."""
        if token_ids and not self._matcher.consume_tokens(list(token_ids)):
            self._check("it does not allow what was generated")
            raise FatalError("the grammar does not allow what was generated")

    def _check(self, what: str) -> None:
        if self._matcher.is_error():
            raise FatalError(f"the grammar cannot go on: {what}: {self._matcher.get_error()[:300]}")


class GuideFactory:
    """Makes guides for one model. Safe for use from several threads."""

    def __init__(self, model_folder: Path, vocab_size: int) -> None:
        """Nothing is read before the first grammar comes."""
        self._path = model_folder / "tokenizer.json"
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._tokenizers: dict[int, LLTokenizer] = {}
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def prepare(self, grammar: Grammar) -> None:
        """Compiles a grammar unless it is there. Raises: EnvironmentProblem, FatalError."""
        self._matcher(grammar)

    def guide(self, grammar: Grammar, output_token_ids: Sequence[int]) -> Guide:
        """Returns the state behind ``output_token_ids``. Raises as ``prepare``, and FatalError for wrong tokens."""
        guide = Guide(self._matcher(grammar).deep_copy(), self._vocab_size)
        guide.consume(output_token_ids)
        return guide

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        with self._lock:
            found = self._compiled.get(grammar)
            if found is None:
                found = LLMatcher(self._tokenizer(grammar.eos_token_id), grammar.text, log_level=0)
                if found.is_error():
                    raise FatalError(f"the grammar does not compile: {found.get_error()[:300]}")
                self._compiled[grammar] = found
                if len(self._compiled) > GRAMMARS_MAX:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            return found

    def _tokenizer(self, eos_token_id: int) -> LLTokenizer:
        if eos_token_id not in self._tokenizers:
            if not self._path.is_file():
                raise EnvironmentProblem(f"grammars need {self._path}, which is not there")
            self._tokenizers[eos_token_id] = LLTokenizer(
                str(self._path), n_vocab=self._vocab_size, eos_token=eos_token_id
            )
        return self._tokenizers[eos_token_id]
