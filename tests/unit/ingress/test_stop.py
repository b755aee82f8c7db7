"""Stop strings: the same ending whatever the cuts, and no fragment shown."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cluster.ingress.api.text import AnswerText
from cluster.ingress.api.tokenizer import TokenizerBundle
from cluster.ingress.detokenize import TokenTable
from cluster.ingress.stop import MAX_STOP_CHARS, StopMatcher
from kvstore.errors import BadInput

from .fakes import make_tokenizer

TOKENIZER = make_tokenizer()
TABLE = TokenTable.from_tokenizer(TOKENIZER)
FEW_CHARS = st.text(alphabet="ab☃", max_size=30)
STOPS = st.lists(st.text(alphabet="ab☃", min_size=1, max_size=5), min_size=1, max_size=4)


def first_end(text: str, stops: list[str]) -> tuple[int, int] | None:
    """Slow and plain: where the first stop string to be complete begins and ends; the longest of several."""
    for end in range(1, len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return min(begins), end
    return None


@settings(max_examples=400, deadline=None)
@given(FEW_CHARS, STOPS, st.lists(st.integers(0, 30), max_size=8))
@example("aaab", ["aab"], [2])
@example("abab☃ababa☃", ["ababa"], [])
@example("aabaaabaa", ["aabaa☃", "aaabaa"], [3, 4])
def test_any_cuts_give_the_same_text(text: str, stops: list[str], cuts: list[int]) -> None:
    """The shown text is what stands before the first complete stop string; a piece never shows a part of one."""
    matcher = StopMatcher(stops)
    shown = ""
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for begin, end in pairwise(edges):
        shown += matcher.push(text[begin:end])
        if matcher.matched:
            break
        matcher.check_invariants()
        assert shown == text[: end - matcher.num_held_chars]
    if not matcher.matched:
        shown += matcher.flush()
    expected = first_end(text, stops)
    assert shown == (text if expected is None else text[: expected[0]])
    assert matcher.matched == (None if expected is None else text[expected[0] : expected[1]])


def test_one_stop_is_the_start_of_the_other() -> None:
    """F48: the shorter is complete first and wins."""
    matcher = StopMatcher(["END", "END OF TEXT"])
    assert matcher.push("the EN") == "the "
    assert matcher.push("D OF TEXT") == ""
    assert matcher.matched == "END"


def test_longer_stop_that_ends_at_the_same_character_wins() -> None:
    """Both are complete at once: the text ends before the longer one."""
    matcher = StopMatcher(["b", "aab"])
    assert matcher.push("xaab") == "x"
    assert matcher.matched == "aab"


def test_near_miss_comes_out() -> None:
    """F48: the held part is shown as soon as it cannot be a stop string, or at the end."""
    matcher = StopMatcher(["STOP!"])
    assert matcher.push("ab STOP") == "ab "
    assert matcher.push("?") == "STOP?"
    assert matcher.push("STO") == ""
    assert matcher.flush() == "STO"


def test_limits_are_refused() -> None:
    """Empty, too long and too many stop strings name the field."""
    for stops in ([""], ["x" * (MAX_STOP_CHARS + 1)], ["x"] * 5):
        with pytest.raises(BadInput) as caught:
            StopMatcher(stops)
        assert caught.value.field == "stop"


@settings(max_examples=300, deadline=None)
@given(FEW_CHARS, st.one_of(st.just([]), STOPS), st.integers(1, 5))
def test_counts_of_delivered_tokens_are_exact(text: str, stops: list[str], size: int) -> None:
    """``num_delivered``: the most leading tokens whose bytes are all in the text given out so far."""
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    answer = AnswerText(TABLE, stop_token_ids=frozenset(), stops=stops)
    shown = ""
    for start in range(0, len(ids), size):
        shown += answer.push(ids[start : start + size])
        answer.check_invariants()
        if answer.stopped:
            break
        num_bytes = len(shown.encode())
        assert answer.num_delivered == max(
            n for n in range(start + size + 1) if len(TABLE.join(ids[:n])) <= num_bytes
        ) or (start + size > len(ids) and answer.num_delivered == len(ids))
    shown += answer.finish()
    expected = first_end(text, stops)
    assert shown == (text if expected is None else text[: expected[0]])
    if expected is None:
        assert answer.num_delivered == answer.num_tokens == len(ids)
    else:
        until_stop = next(
            n for n in range(len(ids) + 1) if len(TABLE.join(ids[:n])) >= len(text[: expected[1]].encode())
        )
        assert answer.num_tokens == until_stop
        shown_bytes = len(shown.encode())
        assert answer.num_delivered == max(n for n in range(until_stop + 1) if len(TABLE.join(ids[:n])) <= shown_bytes)


def test_stop_token_counts_but_has_no_text() -> None:
    """F20: a stop token that is an ordinary word is not shown."""
    word = TOKENIZER.encode("fox", add_special_tokens=False).ids
    answer = AnswerText(TABLE, stop_token_ids=frozenset(word[-1:]), stops=["zzz"])
    assert answer.push(word) + answer.finish() == TABLE.decode(word[:-1])
    assert (answer.num_tokens, answer.num_visible_tokens, answer.num_delivered) == (len(word), len(word) - 1, len(word))


@pytest.mark.model
def test_stop_strings_on_the_packaged_vocabulary(model_folder: Path) -> None:
    """F48: every 7-character slice that begins inside a token and spans at least 3 tokens ends the text exactly."""
    bundle = TokenizerBundle.from_folder(model_folder)
    text = "Certainly! Here are 3 tips, Grüße & 你好 👩‍👩‍👧‍👦: don't panic; breathe (slowly)… then go."
    ids = bundle.encode_now(text)
    edges = list(accumulate(len(bundle.table.text_bytes(token_id)) for token_id in ids))
    num_tried = 0
    for begin in range(len(text) - 7):
        stop = text[begin : begin + 7]
        first, last = len(text[:begin].encode()), len(text[: begin + 7].encode())
        if first in edges or sum(first < edge < last for edge in edges) < 2 or text.index(stop) != begin:
            continue
        num_tried += 1
        for stops in ([stop], [stop + "zz", stop], [stop[:-1] + "\x00"]):
            answer = AnswerText(bundle.table, stop_token_ids=frozenset(), stops=stops)
            pieces = [answer.push([token_id]) for token_id in ids if not answer.stopped]
            shown = "".join(pieces) + answer.finish()
            assert shown == (text[:begin] if stop in stops else text), stops
    assert num_tried >= 10
