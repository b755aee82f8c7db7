"""What a grammar lets through, and that its state is a function of the tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from cluster.ingress.api import grammar as grammars
from cluster.ingress.api.grammar import Function, ToolRules
from cluster.ingress.api.tool_format import BARE, TAGGED, ToolCallParser
from kvstore.core.messages import Grammar
from kvstore.errors import EnvironmentProblem, FatalError
from workers.guide import GRAMMARS_MAX, GuideFactory

EOS = 2
VOCAB = 400
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "n": {"enum": [1, 22, 333]}},
    "required": ["city"],
    "additionalProperties": False,
}


def write(factory: GuideFactory, text: str, seed: int, limit: int = 400) -> list[int] | None:
    """Walks at random inside the mask until the end token; None when the limit came first."""
    chooser = random.Random(seed)
    guide = factory.guide(Grammar(text=text, eos_token_id=EOS), ())
    tokens: list[int] = []
    while len(tokens) < limit:
        allowed = np.flatnonzero(guide.allowed())
        token = EOS if EOS in allowed and chooser.random() < 0.3 else int(chooser.choice(allowed))
        if token == EOS:
            return tokens
        guide.consume([token])
        tokens.append(token)
    return None


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_chosen_fits_the_schema(factory: GuideFactory, tokenizer: Tokenizer, seed: int) -> None:
    """A random walk inside the mask that ends is JSON of the schema, on one line."""
    tokens = write(factory, grammars.json_schema(SCHEMA), seed)
    assert tokens is not None, "a bounded schema must come to its end"
    text = tokenizer.decode(tokens)
    value = json.loads(text)
    assert set(value) <= {"city", "n"} and len(value["city"]) <= 8
    assert value.get("n", 1) in (1, 22, 333)
    assert "\n" not in text


@pytest.mark.parametrize("form", [TAGGED, BARE])
@pytest.mark.parametrize("seed", range(8))
def test_required_calls_are_calls_and_nothing_else(
    factory: GuideFactory, tokenizer: Tokenizer, form: Any, seed: int
) -> None:
    """What the grammar forces is what the parser reads: the two know the same form."""
    functions = (Function(name="weather", parameters=SCHEMA), Function(name="now"))
    rules = ToolRules(functions=functions, is_required=True, is_single=bool(seed % 2))
    tokens = write(factory, grammars.tool_calls(rules, form), seed, limit=3000)
    assert tokens is not None
    parser = ToolCallParser(form, ["weather", "now"], make_id=str)
    pieces = [parser.push(char) for char in tokenizer.decode(tokens)]
    assert "".join(piece.text for piece in [*pieces, parser.finish()]) == ""
    assert parser.num_complete == parser.num_calls >= 1
    assert parser.num_calls == 1 or not rules.is_single


def test_free_choice_binds_from_the_trigger_on(factory: GuideFactory, tokenizer: Tokenizer) -> None:
    """Text runs free and may end anywhere; behind the trigger only a call of a known function goes on."""
    rules = ToolRules(functions=(Function(name="weather", parameters=SCHEMA),))
    grammar = Grammar(text=grammars.tool_calls(rules, TAGGED), eos_token_id=EOS)

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    free = factory.guide(grammar, ids("Hello <tool>, 1 < 2"))
    assert free.allowed()[EOS] and free.allowed().sum() > 200
    bound = factory.guide(grammar, ids("Hello <tool_call>"))
    allowed = [tokenizer.decode([int(i)]) for i in np.flatnonzero(bound.allowed())]
    assert not bound.allowed()[EOS] and all(text.startswith("\n") for text in allowed)
    with pytest.raises(FatalError, match="grammar"):
        factory.guide(grammar, ids(TAGGED.begin("other")))
    done = factory.guide(grammar, ids(TAGGED.call("weather", {"city": "Bonn"})))
    assert done.allowed()[EOS]


def test_the_state_is_rebuilt_from_the_tokens(factory: GuideFactory) -> None:
    """Step by step, or all tokens at once: the same mask behind every token."""
    grammar = Grammar(text=grammars.json_schema(SCHEMA), eos_token_id=EOS)
    tokens = write(factory, grammar.text, 3)
    assert tokens
    stepwise = factory.guide(grammar, ())
    for number in range(len(tokens)):
        assert (factory.guide(grammar, tokens[:number]).allowed() == stepwise.allowed()).all()
        stepwise.consume([tokens[number]])
    assert list(np.flatnonzero(stepwise.allowed())) == [EOS]


def test_ids_beyond_the_tokenizer_and_control_tokens_are_never_allowed(factory: GuideFactory) -> None:
    """A model's vocabulary may be padded; a control token would not be text."""
    allowed = factory.guide(Grammar(text=grammars.any_json_object(), eos_token_id=EOS), ()).allowed()
    assert allowed.shape == (VOCAB,)
    assert not allowed[350:].any() and not allowed[[0, 1, EOS]].any()


def test_compiled_grammars_are_bounded(factory: GuideFactory) -> None:
    """Old ones go; what is compiled again is the same."""
    for number in range(GRAMMARS_MAX + 5):
        factory.prepare(Grammar(text=grammars.json_schema({"const": number}), eos_token_id=EOS))
    assert len(factory._compiled) == GRAMMARS_MAX


def test_what_cannot_be_is_said(factory: GuideFactory, tmp_path: Path) -> None:
    """A grammar that does not compile; a model without a tokenizer."""
    with pytest.raises(FatalError, match="does not compile"):
        factory.prepare(Grammar(text="start: undefined_rule", eos_token_id=EOS))
    with pytest.raises(EnvironmentProblem, match=r"tokenizer\.json"):
        GuideFactory(tmp_path, 10).prepare(Grammar(text="start: /a/", eos_token_id=EOS))
