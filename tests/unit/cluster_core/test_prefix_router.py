"""Prefix-aware routing: the first token soonest, an even load, nobody starved, nobody dead chosen."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.attempt_events import WorkerRef
from cluster.core.prefix_router import (
    HINTS_MAX,
    SLACK_PROMPTS,
    SPREAD_MAX,
    Decision,
    PrefixRouter,
    Prompt,
    held_by_tier,
    prefix_hint,
)
from cluster.core.routing import Candidate, NoPair
from cluster.core.service_rates import ServiceRates
from cluster.core.worker_load import FADE_NS, PrefillQueues, WorkMeter
from kvstore.core.ids import BlockHash

MS = 1_000_000
BLOCK = 16


def make(name: str, role: str = "prefill", *, load: int = 0, life: int = 1, pool_blocks: int = 4096) -> Candidate:
    ref = WorkerRef(worker_id=name, incarnation=f"{name}#{life}", pid=1, node="node-0")
    return Candidate(ref, role, load, pool_blocks)


def make_prompt(num_tokens: int = 1600, *, hints: tuple[str, ...] = (), **held: dict[str, int]) -> Prompt:
    """``held``: worker name -> tier -> blocks, of each worker's first life."""
    by_life = {f"{name}#1": tiers for name, tiers in held.items()}
    blocks = -(-num_tokens // BLOCK) + 8
    return Prompt(num_tokens=num_tokens, block_tokens=BLOCK, total_blocks=blocks, held=by_life, hints=hints)


TWO = [make("a"), make("b"), make("d", "decode")]


def choose(
    router: PrefixRouter, prompt: Prompt, *, now_ns: int = 0, candidates: list[Candidate] | None = None
) -> Decision:
    decision = router.choose(TWO if candidates is None else candidates, prompt, now_ns=now_ns)
    assert isinstance(decision, Decision), decision
    return decision


def chosen(router: PrefixRouter, prompt: Prompt, *, now_ns: int = 0) -> str:
    return choose(router, prompt, now_ns=now_ns).pair.prefill.worker_id


def test_the_worker_with_the_prefix_takes_the_prompt_and_the_numbers_say_why() -> None:
    """Missing tokens at the default millisecond each; what the pool has costs nothing."""
    decision = choose(PrefixRouter(), make_prompt(1600, b={"device": 90}))
    assert decision.pair.prefill.worker_id == "b"
    assert decision.why == "has the longest prefix and the first token soonest"
    best, other = (estimate.to_dict() for estimate in decision.weighed)
    assert (best["missing_tokens"], best["predicted_ttft_ms"], best["held_blocks"]) == (160, 160.0, {"device": 90})
    assert (other["missing_tokens"], other["predicted_ttft_ms"], other["held_blocks"]) == (1600, 1600.0, {})


def test_one_token_is_computed_even_when_everything_is_held() -> None:
    """Logits of the last token are needed."""
    assert choose(PrefixRouter(), make_prompt(1600, a={"device": 100})).chosen.missing_tokens == 1


def test_a_busy_worker_with_the_prefix_is_left_alone() -> None:
    """Once its queue costs more than computing the prefix elsewhere does, and not before."""
    for queue_ms, taker in ((1000, "b"), (6000, "a")):
        router = PrefixRouter()
        router.queues.start("b#1", "att-1", cost_ns=queue_ms * MS, now_ns=0)
        decision = choose(router, make_prompt(1600, b={"device": 90}))
        assert decision.pair.prefill.worker_id == taker, decision
    assert decision.why == "the one with the longest prefix is busy"


def test_tiers_are_weighed_by_what_loading_costs() -> None:
    """A slow tier can be worse than a shorter prefix in a fast one."""
    router = PrefixRouter()
    prompt = make_prompt(1600, a={"device": 60}, b={"disk": 99})
    assert chosen(router, prompt) == "b"
    router.rates.saw_load("disk", num_tokens=1000, duration_ns=900 * MS)
    assert chosen(router, prompt) == "a"


def test_measured_rates_replace_the_default() -> None:
    """A worker that nobody has measured counts as the mean of the others."""
    rates = ServiceRates()
    rates.saw_prefill("a#1", num_tokens=100, duration_ns=10 * MS)
    assert rates.prefill_ns_per_token("a#1") == rates.prefill_ns_per_token("b#1") == 100_000
    rates.saw_prefill("b#1", num_tokens=100, duration_ns=30 * MS)
    assert rates.prefill_ns_per_token("c#1") == 200_000
    rates.saw_prefill("b#1", num_tokens=1, duration_ns=MS)
    assert rates.prefill_ns_per_token("b#1") == 300_000
    rates.forget("b#1")
    assert rates.prefill_ns_per_token("b#1") == 100_000


def test_a_hint_decides_between_equals_and_is_bounded() -> None:
    """The worker that had the key last; a long prefix elsewhere counts more."""
    router = PrefixRouter()
    first = choose(router, make_prompt(hints=("key:t:x",)))
    router.started("att-1", first, hints=("key:t:x",), now_ns=0)
    router.ended("att-1", "a#1", now_ns=MS)
    assert first.pair.prefill.worker_id == "a"
    assert chosen(router, make_prompt(32, hints=("key:t:x",)), now_ns=FADE_NS * 2) == "a"
    assert chosen(router, make_prompt(32), now_ns=FADE_NS * 2) == "b"
    assert chosen(router, make_prompt(1600, hints=("key:t:x",), b={"device": 90}), now_ns=FADE_NS * 2) == "b"
    for number in range(HINTS_MAX + 3):
        router.started(f"x{number}", first, hints=(f"key:t:{number}",), now_ns=0)
        router.ended(f"x{number}", "a#1", now_ns=0)
    router.check_invariants()


def test_prompts_that_begin_alike_have_one_name() -> None:
    """Four blocks make relatives; fewer are a name of their own."""
    hashes = [BlockHash(bytes([number]) * 32) for number in range(6)]
    assert prefix_hint(hashes) == prefix_hint(hashes[:4]) != prefix_hint(hashes[:3])


def test_a_hot_prefix_gets_a_second_worker_before_its_first_one_is_worn_out() -> None:
    """Everybody asks for the same long prefix: after some prompts another worker computes it, and both serve it."""
    router, held, counts = PrefixRouter(), {"a": 0, "b": 0}, {"a": 0, "b": 0}
    for number in range(60):
        now_ns = number * 400 * MS
        tiers = {name: {"device": blocks} for name, blocks in held.items() if blocks}
        decision = choose(router, make_prompt(1600, **tiers), now_ns=now_ns)
        name = decision.pair.prefill.worker_id
        router.started(f"att-{number}", decision, now_ns=now_ns)
        router.ended(f"att-{number}", f"{name}#1", now_ns=now_ns + decision.chosen.cost_ns)
        held[name], counts[name] = 80, counts[name] + 1
    assert held == {"a": 80, "b": 80}
    assert max(counts.values()) <= 1.5 * min(counts.values()), counts


def test_lives_that_are_set_aside_come_last_but_come() -> None:
    """Failing workers, and those this request has failed on."""
    router = PrefixRouter()
    router.cool.failed("b#1", 0)
    decision = choose(router, make_prompt(b={"device": 90}))
    assert decision.pair.prefill.worker_id == "a"
    assert decision.why == "the one with the longest prefix is set aside"
    again = router.choose(TWO, make_prompt(), now_ns=0, avoid=("a#1",))
    assert isinstance(again, Decision)
    assert again.pair.prefill.worker_id in ("a", "b")
    router.cool.failed("a#1", 0)
    assert choose(router, make_prompt()).chosen.is_avoided


def test_decode_is_the_one_with_room_that_lacks_least() -> None:
    """Streams count, and so do the blocks that would have to travel."""
    candidates = [make("a"), make("d0", "decode", load=3), make("d1", "decode", load=3), make("d2", "decode", load=9)]
    prompt = make_prompt(1600, d1={"device": 90})
    assert choose(PrefixRouter(), prompt, candidates=candidates).pair.decode.worker_id == "d1"
    candidates[2] = make("d1", "decode", load=30)
    assert choose(PrefixRouter(), prompt, candidates=candidates).pair.decode.worker_id == "d0"


def test_a_combined_worker_takes_both_sides() -> None:
    """Alone, or when it is sooner than a pair."""
    both = PrefixRouter().choose([make("c", "combined")], make_prompt(), now_ns=0)
    assert isinstance(both, Decision)
    assert both.pair.prefill == both.pair.decode
    mixed = choose(PrefixRouter(), make_prompt(c={"device": 90}), candidates=[*TWO, make("c", "combined")])
    assert (mixed.pair.prefill.worker_id, mixed.pair.decode.worker_id) == ("c", "c")
    half = PrefixRouter().choose([make("a"), make("c", "combined")], make_prompt(a={"device": 90}), now_ns=0)
    assert isinstance(half, Decision)
    assert half.pair.prefill.worker_id == "c"


def test_without_a_pair_or_room_it_says_so() -> None:
    """As the plain rule does."""
    assert PrefixRouter().choose([make("a")], make_prompt(), now_ns=0) == NoPair(
        "no connected pair of prefill and decode workers"
    )
    small = [make("a", pool_blocks=4), make("d", "decode", pool_blocks=4)]
    refused = PrefixRouter().choose(small, make_prompt(), now_ns=0)
    assert isinstance(refused, NoPair)
    assert refused.never


def test_a_new_life_does_not_have_to_catch_up() -> None:
    """It counts as having done what the least worked one did, so it is not flooded."""
    router = PrefixRouter()
    for _ in range(60):
        router.work.give("a#1", cost_ns=100 * MS, now_ns=0)
    decision = choose(router, make_prompt(a={"device": 90}))
    assert decision.pair.prefill.worker_id == "a"
    assert all(not estimate.is_ahead for estimate in decision.weighed)


def test_queues_know_when_a_worker_is_free() -> None:
    """What ends early shortens the wait; what never began is forgotten with its worker."""
    queues = PrefillQueues()
    queues.start("a#1", "x", cost_ns=100, now_ns=0)
    queues.start("a#1", "y", cost_ns=50, now_ns=10)
    assert queues.wait_ns("a#1", 10) == 140
    queues.end("a#1", "x", now_ns=20)
    assert queues.wait_ns("a#1", 20) == 50
    queues.end("a#1", "x", now_ns=20)
    queues.end("a#1", "y", now_ns=30)
    assert (queues.wait_ns("a#1", 30), queues.num_prompts("a#1")) == (0, 0)
    queues.start("a#1", "z", cost_ns=50, now_ns=30)
    queues.forget("a#1")
    assert queues.wait_ns("a#1", 30) == 0
    queues.check_invariants()


def test_work_fades_and_a_busy_worker_is_expected_to_be_busy() -> None:
    """The expected wait grows with the load of the last minute, before any queue stands there."""
    meter = WorkMeter()
    meter.give("a#1", cost_ns=1000, now_ns=0)
    assert meter.given_ns("a#1", FADE_NS) == pytest.approx(1000 / 2.718281828, rel=1e-6)
    idle, busy = WorkMeter(), WorkMeter()
    for number in range(10):
        idle.give("a#1", cost_ns=500 * MS, now_ns=number * 1000 * MS)
        busy.give("a#1", cost_ns=5000 * MS, now_ns=number * 1000 * MS)
    now_ns = 10_000 * MS
    assert busy.expected_wait_ns("a#1", now_ns) > 20 * idle.expected_wait_ns("a#1", now_ns) > 0


@pytest.mark.parametrize(
    ("lengths", "served"),
    [
        ({}, {}),
        ({"device": 4, "host": 9}, {"device": 4, "host": 5}),
        ({"device": 9, "host": 4}, {"device": 9}),
        ({"host": 3, "disk": 7}, {"host": 3, "disk": 4}),
    ],
)
def test_the_fastest_tier_serves_first(lengths: dict[str, int], served: dict[str, int]) -> None:
    """No block counts twice."""
    assert held_by_tier(**lengths) == served


# --- any order of events ------------------------------------------------------------------------------------


@dataclass
class Site:
    """Workers that live, die and come back, as the driver of a router sees them."""

    router: PrefixRouter = field(default_factory=PrefixRouter)
    lives: dict[str, int] = field(default_factory=lambda: {"a": 1, "b": 1, "c": 1})
    dead: set[str] = field(default_factory=set)
    now_ns: int = 0
    under_way: list[tuple[str, str, int]] = field(default_factory=list)
    num_attempts: int = 0

    def candidates(self) -> list[Candidate]:
        alive = [make(name, life=life) for name, life in self.lives.items() if name not in self.dead]
        return [*alive, make("d", "decode")]


events = st.lists(
    st.one_of(
        st.tuples(st.just("route"), st.integers(1, 4000), st.sampled_from("abc"), st.integers(0, 250)),
        st.tuples(st.just("end"), st.integers(0, 10)),
        st.tuples(st.just("kill"), st.sampled_from("abc")),
        st.tuples(st.just("revive"), st.sampled_from("abc")),
        st.tuples(st.just("fail"), st.sampled_from("abc")),
        st.tuples(st.just("wait"), st.integers(1, 20_000)),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=150)
@given(events)
def test_whatever_happens_only_the_living_are_chosen_and_somebody_always_is(story: list[tuple]) -> None:  # type: ignore[type-arg]
    """A dead life is never chosen; with one prefill side alive a prompt always has a pair; the books stay right."""
    site = Site()
    for what, *arguments in story:
        if what == "route":
            num_tokens, holder, blocks = arguments
            held = {holder: {"device": min(blocks, num_tokens // BLOCK)}} if blocks else {}
            decision = site.router.choose(site.candidates(), make_prompt(num_tokens, **held), now_ns=site.now_ns)
            if len(site.dead) == 3:
                assert isinstance(decision, NoPair)
                continue
            assert isinstance(decision, Decision)
            name = decision.pair.prefill.worker_id
            assert name not in site.dead
            assert decision.pair.prefill.incarnation == f"{name}#{site.lives[name]}"
            fit = [e for e in decision.weighed if not e.is_avoided]
            assert not decision.chosen.is_avoided or not fit, "set aside, but others were there"
            assert not decision.chosen.is_ahead or all(e.is_ahead for e in fit), "ahead, but others were not"
            site.num_attempts += 1
            site.router.started(f"att-{site.num_attempts}", decision, now_ns=site.now_ns)
            site.under_way.append((f"att-{site.num_attempts}", decision.pair.prefill.incarnation, 0))
        elif what == "end" and site.under_way:
            attempt_id, life, _ = site.under_way.pop(arguments[0] % len(site.under_way))
            site.router.ended(attempt_id, life, now_ns=site.now_ns)
        elif what == "kill" and arguments[0] not in site.dead:
            site.dead.add(arguments[0])
            site.router.gone(f"{arguments[0]}#{site.lives[arguments[0]]}")
        elif what == "revive" and arguments[0] in site.dead:
            site.dead.discard(arguments[0])
            site.lives[arguments[0]] += 1
        elif what == "fail":
            site.router.cool.failed(f"{arguments[0]}#{site.lives[arguments[0]]}", site.now_ns)
        elif what == "wait":
            site.now_ns += arguments[0] * MS
        site.router.check_invariants()


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(50, 3000), st.integers(0, 1), st.integers(0, 100)), min_size=40, max_size=120),
    st.integers(2, 5),
)
def test_the_spread_of_work_is_bounded_whatever_is_cached_where(
    prompts: list[tuple[int, int, int]], num_workers: int
) -> None:
    """The most worked worker stays within the factor of the least worked one, plus the slack and one prompt."""
    router = PrefixRouter(work=WorkMeter(fade_ns=1 << 60))
    workers = [make(f"w{number}") for number in range(num_workers)]
    candidates = [*workers, make("d", "decode")]
    work = dict.fromkeys((worker.ref.incarnation for worker in workers), 0)
    largest_ns = 0
    for number, (num_tokens, favoured, share) in enumerate(prompts):
        # The cache always favours one of the first two.
        held = {f"w{favoured}": {"device": num_tokens * share // 100 // BLOCK}}
        decision = choose(router, make_prompt(num_tokens, **held), now_ns=number * MS, candidates=candidates)
        router.started(f"att-{number}", decision, now_ns=number * MS)
        router.ended(f"att-{number}", decision.pair.prefill.incarnation, now_ns=number * MS)
        work[decision.pair.prefill.incarnation] += decision.chosen.cost_ns
        largest_ns = max(largest_ns, max(estimate.cost_ns for estimate in decision.weighed))
        slack_ns = (SLACK_PROMPTS + 1) * largest_ns
        assert max(work.values()) <= SPREAD_MAX * min(work.values()) + slack_ns, work
    assert min(work.values()) > 0, "somebody never got a prompt"
