"""Tool calls out of text that comes in any pieces."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from cluster.ingress.api.shapes import joined_calls
from cluster.ingress.api.tool_format import BARE, TAGGED, ToolCallParser, ToolFormat
from cluster.ingress.api.wire import Piece

ARGUMENTS = [{"city": 'a "}\\" b'}, {}, {"deep": [{"x": "}]"}, [1, 2]], "n": None}, {"text": "}\n</tool_call>"}]


def parse(form: ToolFormat, pieces: list[str]) -> tuple[list[Piece], ToolCallParser]:
    parser = ToolCallParser(form, ["weather", "time"], make_id=lambda number: f"call_{number}")
    return [*(parser.push(piece) for piece in pieces), parser.finish()], parser


def cut(text: str, seed: int) -> list[str]:
    """Cuts a text into random pieces; seed 0: single characters, 1: one piece."""
    if seed < 2:
        return list(text) if seed == 0 else [text]
    chooser = random.Random(seed)
    places = sorted(chooser.sample(range(len(text) + 1), min(len(text), chooser.randint(1, 12))))
    return [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]


def show(pieces: list[Piece]) -> tuple[str, list[tuple[str, Any]]]:
    calls = joined_calls(pieces)
    return "".join(p.text for p in pieces), [(c.function.name, c.function.arguments) for c in calls]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("form", [TAGGED, BARE])
def test_calls_and_text_whatever_the_cuts(form: ToolFormat, seed: int) -> None:
    """Names, arguments byte by byte, and the text around; layout between calls is not text."""
    calls = [("weather" if number % 2 else "time", arguments) for number, arguments in enumerate(ARGUMENTS)]
    text = "Let me see < {x.\n" + "\n".join(form.call(name, arguments) for name, arguments in calls) + "\n"
    pieces, parser = parse(form, cut(text, seed))
    assert show(pieces) == ("Let me see < {x.", [(n, json.dumps(a, ensure_ascii=False)) for n, a in calls])
    assert parser.num_complete == len(calls)
    assert not parser.holds_text


@pytest.mark.parametrize("seed", range(6))
def test_text_without_a_call_is_all_shown(seed: int) -> None:
    """Also what looks like the start of a call, and white space at the end."""
    text = " a <tool_ <tool_cal b\n\n <tool_call"
    pieces, parser = parse(TAGGED, cut(text, seed))
    assert show(pieces) == (text, [])
    assert parser.num_calls == 0


def test_what_may_be_a_call_is_held_back() -> None:
    """No character of a trigger is shown before it is certain that it is text."""
    parser = ToolCallParser(TAGGED, ["f"], make_id=str)
    assert parser.push("hello <tool").text == "hello"
    assert parser.holds_text
    assert parser.push("box>").text == " <toolbox>"
    assert not parser.holds_text


def test_id_type_and_name_come_once() -> None:
    """Contract section 2: only in the first delta of an index; the index always."""
    pieces, _ = parse(TAGGED, list(TAGGED.call("time", {"a": 1}) + "\n" + TAGGED.call("weather", {})))
    deltas = [delta for piece in pieces for delta in piece.calls]
    firsts = [delta for delta in deltas if isinstance(delta.id, str)]
    assert [(d.index, d.id, d.type, d.function.name, d.function.arguments) for d in firsts] == [
        (0, "call_0", "function", "time", ""),
        (1, "call_1", "function", "weather", ""),
    ]
    for delta in deltas:
        if delta not in firsts:
            assert not isinstance(delta.type, str) and not isinstance(delta.function.name, str)


@pytest.mark.parametrize("length", range(len(TAGGED.call("time", {"a": "b"}))))
def test_a_cut_off_call_is_not_text(length: int) -> None:
    """max_tokens in the middle: nothing of the call's form leaks into the content."""
    text = TAGGED.call("time", {"a": "b"})[:length]
    pieces, parser = parse(TAGGED, ["x ", text])
    content, calls = show(pieces)
    assert parser.num_complete == 0
    assert content == ("x " + text if length < len(TAGGED.trigger) else "x")
    assert all(name == "time" and '{"a": "b"}'.startswith(arguments) for name, arguments in calls)
