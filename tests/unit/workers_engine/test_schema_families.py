"""JSON schemas at random, by family of features: what is accepted binds every answer, what is not is refused by name.

A schema is accepted as a request has it accepted: the grammar compiles. Then answers are walked at random inside the
mask, over a tiny tokenizer, and judged by the ``jsonschema`` package. ``REFUSED`` holds the features that grammars do
not have: silently leaving one out would give answers that do not fit.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from cluster.ingress.api import grammar as grammars
from cluster.ingress.api.errors import InvalidRequest
from cluster.ingress.api.number_bounds import unkept_bound
from kvstore.core.messages import Grammar
from kvstore.errors import FatalError
from workers.guide import GuideFactory

EOS = 2

Schema = dict[str, Any]
Dice = random.Random
SCHEMAS = 20
"""Of each family."""
ANSWERS = 4
"""Of each schema."""
TOKENS_MAX = 600
PARAM = "response_format.json_schema.schema"
CLOSING = ('"', "}", "]", "}}", '"}', "]}")


def _object(properties: Schema, **more: Any) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    } | more


def _leaf(dice: Dice) -> Schema:
    """A small schema that anything may hold."""
    return dice.choice(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"enum": ["a", 1, None]},
            {"type": "integer", "minimum": 0, "maximum": dice.randint(1, 99)},
            {"type": "string", "maxLength": dice.randint(1, 6)},
        ]
    )


def _strings(dice: Dice) -> Schema:
    low = dice.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + dice.randint(0, 5)}


def _integers(dice: Dice) -> Schema:
    low = dice.randint(-200, 200)
    return {"type": "integer", "minimum": low, "maximum": low + dice.randint(0, 300)}


def _open_integers(dice: Dice) -> Schema:
    return {"type": "integer", dice.choice(["exclusiveMinimum", "minimum"]): dice.randint(-50, 50)}


def _numbers(dice: Dice) -> Schema:
    low = dice.randint(-30, 30) / 4
    kinds = dice.choice(["minimum", "exclusiveMinimum"]), dice.choice(["maximum", "exclusiveMaximum"])
    schema = {"type": "number", kinds[0]: low, kinds[1]: low + dice.randint(1, 50) / 8}
    return _numbers(dice) if unkept_bound(schema) else schema


def _nested(dice: Dice, depth: int = 3) -> Schema:
    if depth == 0:
        return _leaf(dice)
    if dice.random() < 0.3:
        return {"type": "array", "items": _nested(dice, depth - 1), "minItems": 1, "maxItems": 2}
    return _object({name: _nested(dice, depth - 1) for name in "ab"[: dice.randint(1, 2)]})


def _recursive(dice: Dice) -> Schema:
    node = _object({"v": _leaf(dice)}) | {"additionalProperties": False}
    node["properties"]["next"] = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


def _optional(dice: Dice) -> Schema:
    return _object({name: _leaf(dice) for name in "abcd"}, required=dice.sample("abcd", dice.randint(0, 3)))


ACCEPTED: dict[str, Callable[[Dice], Schema]] = {
    "booleans and null": lambda dice: {"type": dice.choice(["boolean", "null"])},
    "bounded strings": _strings,
    "patterns": lambda dice: {
        "type": "string",
        "pattern": dice.choice(["^[a-z]{1,4}$", "^(on|off)$", r"^\d{2}-\d{1,3}$"]),
    },
    "formats": lambda dice: {"type": "string", "format": dice.choice(["date", "uuid", "ipv4", "ipv6", "email"])},
    "bounded integers": _integers,
    "half-bounded integers": _open_integers,
    "bounded numbers": _numbers,
    "integer multiples": lambda dice: {
        "type": "integer",
        "multipleOf": dice.randint(2, 9),
        "minimum": 0,
        "maximum": 500,
    },
    "constants": lambda dice: {"const": dice.choice(["x", 3, None, True, [1, {"a": "ü"}], {"a": [1, None]}])},
    "enumerations": lambda dice: {
        "enum": dice.sample(["a", "b c", 1, -2, 2.5, None, True, [], {}], dice.randint(1, 5))
    },
    "lists of types": lambda dice: {"type": dice.sample(["boolean", "null", "integer"], 2)},
    "required properties": lambda dice: _object({name: _leaf(dice) for name in ("a", "b b", "ü", '"')}),
    "optional properties": _optional,
    "typed additional properties": lambda dice: {
        "type": "object",
        "properties": {"a": _leaf(dice)},
        "required": ["a"],
        "additionalProperties": _leaf(dice),
    },
    "pattern properties": lambda dice: {
        "type": "object",
        "patternProperties": {"^x[0-9]$": _leaf(dice)},
        "additionalProperties": False,
    },
    "numbers of properties": lambda dice: {
        "type": "object",
        "additionalProperties": _leaf(dice),
        "minProperties": (low := dice.randint(0, 2)),
        "maxProperties": low + dice.randint(0, 2),
    },
    "bounded arrays": lambda dice: {
        "type": "array",
        "items": _leaf(dice),
        "minItems": (low := dice.randint(0, 2)),
        "maxItems": low + dice.randint(0, 3),
    },
    "tuples": lambda dice: {
        "type": "array",
        "prefixItems": [_leaf(dice) for _ in range(dice.randint(1, 3))],
        "items": False,
        "minItems": 1,
    },
    "tuples with a tail": lambda dice: {
        "type": "array",
        "prefixItems": [_leaf(dice)],
        "items": _leaf(dice),
        "minItems": 1,
        "maxItems": 4,
    },
    "anyOf": lambda dice: {"anyOf": [_leaf(dice) for _ in range(dice.randint(1, 3))]},
    "oneOf that cannot overlap": lambda dice: {
        "oneOf": [{"type": "boolean"}, {"type": "string", "maxLength": dice.randint(1, 5)}]
    },
    "allOf": lambda dice: {
        "allOf": [{"type": "integer", "minimum": dice.randint(-5, 5)}, {"maximum": dice.randint(5, 90)}]
    },
    "references": lambda dice: (
        _object({"p": {"$ref": "#/$defs/leaf"}, "q": {"$ref": "#/$defs/leaf"}}) | {"$defs": {"leaf": _leaf(dice)}}
    ),
    "recursion": _recursive,
    "nesting": _nested,
    "annotations": lambda dice: _leaf(dice) | {"title": "T", "description": "d", "default": 1, "examples": [2]},
}

REFUSED: dict[str, tuple[str, Schema]] = {
    "not": ("not", {"not": {"type": "string"}}),
    "unique items": ("uniqueItems", {"type": "array", "uniqueItems": True}),
    "contains": ("contains", {"type": "array", "contains": {"type": "null"}}),
    "names of properties": ("propertyNames", {"type": "object", "propertyNames": {"pattern": "^a"}}),
    "dependent properties": ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
    "dependent schemas": ("dependentSchemas", {"type": "object", "dependentSchemas": {"a": {}}}),
    "conditions": ("if", {"if": {"type": "string"}, "then": {"minLength": 3}}),
    "oneOf that overlaps": ("oneOf", {"oneOf": [{"type": "number"}, {"type": "integer"}]}),
    "unevaluated properties": ("unevaluatedProperties", {"type": "object", "unevaluatedProperties": False}),
    "unevaluated items": ("unevaluatedItems", {"type": "array", "unevaluatedItems": False}),
    "dynamic references": ("$dynamicRef", {"$dynamicRef": "#x"}),
    "references to nothing": ("/$defs/y", {"$ref": "#/$defs/y"}),
    "references elsewhere": ("http://x/y", {"$ref": "http://x/y"}),
    "unknown formats": ("format", {"type": "string", "format": "kopir"}),
    "patterns that look ahead": ("regex", {"type": "string", "pattern": "(?=a)b"}),
    "bounds that slip": ("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 2, "maximum": 2.25}),
    "bounds that slip below zero": ("exclusiveMaximum", {"minimum": -2.25, "exclusiveMaximum": -2}),
    "bounds that slip apart": ("exclusiveMinimum", {"allOf": [{"exclusiveMinimum": 0}, {"exclusiveMaximum": 0.5}]}),
    "unknown types": ("nonsense", {"type": "nonsense"}),
}

IMPOSSIBLE: dict[str, tuple[str, Schema]] = {
    "bounds that nothing meets": ("minLength", {"type": "string", "minLength": 5, "maxLength": 2}),
    "names that cannot be": ("'a'", {"type": "object", "required": ["a"], "additionalProperties": False}),
}


def _answer(factory: GuideFactory, tokenizer: Tokenizer, text: str, dice: Dice) -> str | None:
    """Walks at random inside the mask, a little in a hurry; None when it came to no end."""
    guide = factory.guide(Grammar(text=text, eos_token_id=EOS), ())
    closing = {token for word in CLOSING if (token := tokenizer.token_to_id(word)) is not None}
    tokens: list[int] = []
    while len(tokens) < TOKENS_MAX:
        allowed = np.flatnonzero(guide.allowed()).tolist()
        assert allowed, "a mask that allows nothing"
        quick = [token for token in allowed if token in closing or token == EOS]
        token = dice.choice(quick if quick and dice.random() < 0.4 else allowed)
        if token == EOS:
            return str(tokenizer.decode(tokens))
        guide.consume([token])
        tokens.append(token)
    return None


@pytest.mark.parametrize("family", ACCEPTED)
async def test_what_is_accepted_binds_every_answer(factory: GuideFactory, tokenizer: Tokenizer, family: str) -> None:
    """Every answer of every schema of the family is valid; at the top, and as a property of an object."""
    for number in range(SCHEMAS):
        dice = random.Random(f"{family} {number}")
        schema = ACCEPTED[family](dice)
        if number % 2 and "$defs" not in schema:
            schema = _object({"inner": schema})
        validator = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        text = await grammars.checked(grammars.json_schema(schema), param=PARAM)
        answers = [_answer(factory, tokenizer, text, dice) for _ in range(ANSWERS)]
        assert any(answer is not None for answer in answers), schema
        for answer in answers:
            if answer is not None:
                errors = [error.message for error in validator.iter_errors(json.loads(answer))]
                assert not errors, (schema, answer, errors)


@pytest.mark.parametrize("family", REFUSED)
@pytest.mark.parametrize("depth", [0, 1, 2])
async def test_what_grammars_do_not_have_is_refused_by_name(family: str, depth: int) -> None:
    """However deep it is hidden: 400 with the field of the request, and the keyword in the message."""
    keyword, schema = REFUSED[family]
    for _ in range(depth):
        schema = {"type": "array", "items": schema} if depth == 1 else _object({"inner": schema})
    with pytest.raises(InvalidRequest) as refused:
        await grammars.checked(grammars.json_schema(schema), param=PARAM)
    assert refused.value.param == PARAM and keyword in str(refused.value), str(refused.value)


@pytest.mark.parametrize("family", IMPOSSIBLE)
async def test_what_nothing_can_meet_is_refused_by_name(family: str) -> None:
    """A schema without any valid answer: said at once, and not found out after the last token."""
    keyword, schema = IMPOSSIBLE[family]
    with pytest.raises(InvalidRequest) as refused:
        await grammars.checked(grammars.json_schema(schema), param=PARAM)
    assert refused.value.param == PARAM and keyword in str(refused.value), str(refused.value)


@pytest.mark.parametrize("low", ["minimum", "exclusiveMinimum"])
@pytest.mark.parametrize("high", ["maximum", "exclusiveMaximum"])
def test_every_bound_that_slips_is_known(factory: GuideFactory, tokenizer: Tokenizer, low: str, high: str) -> None:
    """Around each pair of bounds: a grammar lets a number through that does not fit only where it is refused."""
    points = [-2.25, -2, -1, -0.5, 0, 0.5, 1, 2, 2.25, 3]
    texts = [
        f"{whole}{part}" for whole in ("-3", "-2", "-1", "-0", *range(4)) for part in ("", ".0", ".25", ".5", ".75")
    ]
    for start in points:
        for end in (point for point in points if point > start):
            schema = {"type": "number", low: start, high: end}
            if unkept_bound(schema):
                continue
            validator = jsonschema.Draft202012Validator(schema)
            grammar = Grammar(text=grammars.json_schema(schema), eos_token_id=EOS)
            for text in texts:
                ids = tokenizer.encode(text, add_special_tokens=False).ids
                assert not _takes(factory, grammar, ids) or validator.is_valid(json.loads(text)), (schema, text)


def _takes(factory: GuideFactory, grammar: Grammar, token_ids: list[int]) -> bool:
    try:
        guide = factory.guide(grammar, token_ids)
    except FatalError:
        return False
    return bool(guide.allowed()[EOS])
