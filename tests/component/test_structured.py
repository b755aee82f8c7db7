"""Answers bound by a grammar: over the hand-over, in company, through preemption; the same tokens as a plain run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import msgspec
import pytest
from mini_cluster import MiniCluster, collect, make_spec, tiny_tokenizer

from cluster.ingress.api import grammar as grammars
from cluster.ingress.api.errors import UpstreamFailed
from cluster.ingress.api.grammar import Function, ToolRules
from cluster.ingress.api.tool_format import TAGGED
from kvstore.core.messages import GenerationSpec, Grammar

MakeCluster = Callable[..., MiniCluster]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 30}, "size": {"enum": [1, 2, 3]}, "ok": {"type": "boolean"}},
    "required": ["name", "size", "ok"],
    "additionalProperties": False,
}
RULES = ToolRules(functions=(Function(name="look", parameters=SCHEMA),), is_required=True, is_single=True)


def make_bound(text: str, num_prompt: int, **settings: object) -> GenerationSpec:
    spec = make_spec(num_prompt, 120, **settings)  # type: ignore[arg-type]
    return msgspec.structs.replace(spec, grammar=Grammar(text=text, eos_token_id=2), stop_token_ids=(2,))


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("combined",)])
@pytest.mark.parametrize("pool_blocks", [64, 16])
async def test_bound_answers_are_what_was_asked_for(
    make_cluster: MakeCluster, roles: tuple[str, ...], pool_blocks: int
) -> None:
    """JSON of the schema and a tool call from a model of random weights, greedy and hot; free answers beside them.

    In the small pool some are preempted: their state is rebuilt from their tokens.
    """
    cluster = make_cluster()
    await cluster.start(*roles, pool_blocks=pool_blocks)
    schema, call = grammars.json_schema(SCHEMA), grammars.tool_calls(RULES, TAGGED)
    specs = [
        make_bound(schema, 40, salt=1),
        make_bound(schema, 41, salt=2, temperature=1.5, seed=2),
        make_bound(call, 42, salt=3, temperature=1.0, seed=3),
        make_spec(40, 60, salt=4),
        make_bound(schema, 70, salt=5, temperature=2.0, seed=5, presence_penalty=1.0),
    ]
    generations = [await cluster.submit(spec, f"req-{n}") for n, spec in enumerate(specs)]
    results = await asyncio.gather(*(collect(generation) for generation in generations))
    for spec, (tokens, end) in zip(specs, results, strict=True):
        assert tokens == cluster.golden(spec)
        if spec.grammar is None:
            continue
        assert end == "stop"
        text = tiny_tokenizer().decode(tokens[:-1])
        if spec.grammar.text == call:
            assert text.startswith(TAGGED.begin("look")) and text.endswith(TAGGED.end)
            text = text[len(TAGGED.begin("look")) : -len(TAGGED.end)]
        value = json.loads(text)
        assert set(value) == {"name", "size", "ok"} and value["size"] in (1, 2, 3)
    await cluster.at_rest()


async def test_a_grammar_that_cannot_be_followed_fails_alone(make_cluster: MakeCluster) -> None:
    """The door refuses what does not compile; should one come through, its own attempt ends and nothing else."""
    cluster = make_cluster()
    await cluster.start("prefill", "decode")
    good = make_spec(40, 40)
    running = await cluster.submit(good, "req-good")
    with pytest.raises(UpstreamFailed, match="does not compile"):
        await collect(await cluster.submit(make_bound("start: nothing", 40), "req-bad"))
    assert (await collect(running))[0] == cluster.golden(good)
    await cluster.at_rest()
