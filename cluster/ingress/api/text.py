"""The text of one answer: from token batches to pieces that may be shown, and how many tokens those pieces cover.

Owns decoder, stop matcher and counts of one attempt. A restarted attempt gets a new ``AnswerText``. Never writes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from cluster.ingress.detokenize import IncrementalDecoder, TokenTable
from cluster.ingress.stop import StopMatcher


class AnswerText:
    """Feeds tokens in, gives text out.

    ``num_tokens`` counts every token taken, the stop token and those of a stop string included; tokens after a stop
    string are not taken. ``num_delivered`` counts the leading tokens whose text lies wholly in what was given out.
    """

    def __init__(self, table: TokenTable, *, stop_token_ids: frozenset[int], stops: Sequence[str]) -> None:
        self._table = table
        self._stop_token_ids = stop_token_ids
        self._decoder = IncrementalDecoder()
        self._matcher = StopMatcher(stops) if stops else None
        self._marks: deque[tuple[int, int]] = deque()
        """(number of tokens, characters that must be out for them), for tokens not yet delivered."""
        self._num_decoded_chars = 0
        self._num_shown_chars = 0
        self.num_tokens = 0
        self.num_visible_tokens = 0
        """Tokens taken, without the stop token."""
        self.num_delivered = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self._matcher is not None and self._matcher.matched is not None

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens and returns the text that may be shown now."""
        if self._matcher is None:
            return self._push_plain(token_ids)
        shown = []
        for token_id in token_ids:
            shown.append(self._push_matched(self._matcher, token_id))
            if self.stopped:
                break
        return "".join(shown)

    def finish(self) -> str:
        """Ends the answer; returns what was held back. Nothing is left when a stop string matched."""
        if self.stopped:
            return ""
        text = self._decoder.flush()
        if self._matcher is not None:
            text = self._matcher.push(text)
            if self.stopped:
                self._show(text)
                return text
            text += self._matcher.flush()
        self._marks.clear()
        self.num_delivered = self.num_tokens
        return text

    def _push_plain(self, token_ids: Sequence[int]) -> str:
        pieces = [self._visible_bytes(token_id) for token_id in token_ids]
        text = self._decoder.push(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        num_before = self.num_tokens
        self.num_tokens += len(pieces)
        num_pending = self._decoder.num_pending_bytes
        num_complete = len(pieces)
        while num_pending > 0 and num_complete > 0:
            num_complete -= 1
            num_pending -= len(pieces[num_complete])
        if num_pending <= 0:
            self.num_delivered = num_before + num_complete
        return text

    def _push_matched(self, matcher: StopMatcher, token_id: int) -> str:
        text = self._decoder.push(self._visible_bytes(token_id))
        self.num_tokens += 1
        self._num_decoded_chars += len(text)
        # A fragment will be at least one character, whatever completes it.
        num_chars = self._num_decoded_chars + (1 if self._decoder.num_pending_bytes else 0)
        self._marks.append((self.num_tokens, num_chars))
        return self._show(matcher.push(text))

    def _show(self, text: str) -> str:
        self._num_shown_chars += len(text)
        while self._marks and self._marks[0][1] <= self._num_shown_chars:
            self.num_delivered = self._marks.popleft()[0]
        return text

    def _visible_bytes(self, token_id: int) -> bytes:
        if token_id in self._stop_token_ids:
            return b""
        self.num_visible_tokens += 1
        return self._table.text_bytes(token_id)

    def check_invariants(self) -> None:
        """Raises AssertionError when the counts contradict each other."""
        assert 0 <= self.num_delivered <= self.num_tokens, (self.num_delivered, self.num_tokens)
        assert self.num_visible_tokens <= self.num_tokens
        assert self._num_shown_chars <= self._num_decoded_chars or self._matcher is None
        self._decoder.check_invariants()
