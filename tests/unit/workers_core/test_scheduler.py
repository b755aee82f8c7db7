"""What runs in a step: streams always, prompts in shares, nobody starves and nobody stalls the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import BadInput
from workers.core.scheduler import Key, Piece, Scheduler, SchedulerLimits, StepPlan

MS = 1_000_000


def key(name: str, epoch: int = 1) -> Key:
    return name, epoch


def make_scheduler(**limits: int | float) -> Scheduler:
    return Scheduler(SchedulerLimits(**limits))  # type: ignore[arg-type]


def add_stream(scheduler: Scheduler, name: str, *, num_tokens: int = 10, credit: int = 1000, room: int = 4096) -> None:
    scheduler.add_stream(key(name), num_tokens=num_tokens, num_outputs=1, max_index=credit, room_tokens=room)


@dataclass
class Machine:
    """Runs plans at stated costs: ``decode_ms`` for any number of streams, ``token_ms`` for each prompt token."""

    scheduler: Scheduler
    decode_ms: float = 30.0
    token_ms: float = 0.75
    now_ms: float = 0.0
    steps: list[tuple[StepPlan, float]] = field(default_factory=list)
    done_ms: dict[Key, float] = field(default_factory=dict)

    def step(self) -> StepPlan:
        plan = self.scheduler.plan()
        took_ms = (self.decode_ms if plan.decode else 0.0) + self.token_ms * plan.num_prefill_tokens
        self.now_ms += took_ms
        self.scheduler.on_step(plan, duration_ns=int(took_ms * MS))
        self.scheduler.check_invariants()
        self.steps.append((plan, took_ms))
        for piece in plan.pieces:
            if piece.is_last:
                self.done_ms[piece.key] = self.now_ms
        return plan

    def run_until(self, condition: Callable[[], bool], *, steps_max: int = 5000) -> None:
        for _ in range(steps_max):
            if condition():
                return
            self.step()
        raise AssertionError(f"not reached in {steps_max} steps")


def test_an_empty_scheduler_has_nothing_to_do() -> None:
    """No plan, no work; a step of nothing never happens."""
    scheduler = Scheduler()
    assert not scheduler.plan()
    assert not scheduler.has_work


def test_one_prompt_alone_takes_whole_chunks() -> None:
    """Exact pieces, also from the middle of a block, and the last one says so."""
    scheduler = make_scheduler(chunk_tokens=64)
    scheduler.add_prompt(key("a"), num_tokens=150, num_computed=5)
    machine = Machine(scheduler)
    pieces = [machine.step().pieces for _ in range(3)]
    assert pieces == [
        (Piece(key("a"), 5, 64, False),),
        (Piece(key("a"), 64, 128, False),),
        (Piece(key("a"), 128, 150, True),),
    ]
    assert not scheduler.has_work


def test_streams_decode_in_every_step_while_credit_and_room_last() -> None:
    """Index below the credit, position inside the blocks; either one can be raised later, never lowered."""
    scheduler = Scheduler()
    add_stream(scheduler, "free")
    add_stream(scheduler, "credit", credit=2)
    add_stream(scheduler, "room", num_tokens=16, room=16)
    machine = Machine(scheduler)
    assert machine.step().decode == (key("free"), key("credit"), key("room"))
    assert machine.step().decode == (key("free"),)
    scheduler.on_credit(key("credit"), 1)
    scheduler.on_credit(key("nobody"), 99)
    assert machine.step().decode == (key("free"),)
    scheduler.on_credit(key("credit"), 3)
    scheduler.on_room(key("room"), 32)
    assert machine.step().decode == (key("free"), key("credit"), key("room"))


def test_only_the_exact_key_is_removed() -> None:
    """F39: "job-1" is not "job-10", another epoch is another attempt, and an unknown key changes nothing."""
    scheduler = Scheduler()
    for name in ("job-1", "job-10"):
        add_stream(scheduler, name)
        scheduler.add_prompt(key(f"p-{name}"), num_tokens=50, num_computed=0)
    for unknown in (key("job-1", 2), key(""), key("job"), key("p-job-")):
        scheduler.remove(unknown)
    scheduler.remove(key("job-1"))
    scheduler.remove(key("p-job-1"))
    plan = scheduler.plan()
    assert plan.decode == (key("job-10"),)
    assert [piece.key for piece in plan.pieces] == [key("p-job-10")]


@pytest.mark.parametrize("with_streams", [False, True])
def test_a_short_prompt_beside_a_long_one(with_streams: bool) -> None:
    """F77: the first token of 20 tokens is there two steps after they came; the 6,000 go on meanwhile."""
    scheduler = make_scheduler(chunk_tokens=512)
    machine = Machine(scheduler)
    if with_streams:
        for number in range(4):
            add_stream(scheduler, f"s{number}", credit=1 << 30, room=1 << 30)
        machine.step()
    scheduler.add_prompt(key("long"), num_tokens=6000, num_computed=0)
    machine.step()
    scheduler.add_prompt(key("short"), num_tokens=20, num_computed=0)
    num_before = len(machine.steps)
    machine.run_until(lambda: key("short") in machine.done_ms)
    assert len(machine.steps) - num_before <= 2
    for plan, _ in machine.steps[num_before:]:
        assert any(piece.key == key("long") for piece in plan.pieces)


def test_a_stream_of_short_prompts_starves_nobody() -> None:
    """F77: shorts at 2/s for ever: each within two chunk times, and the long one ends in at most twice its time."""
    scheduler = make_scheduler(chunk_tokens=512)
    machine = Machine(scheduler)
    alone_ms = 6000 * machine.token_ms
    scheduler.add_prompt(key("long"), num_tokens=6000, num_computed=0)
    arrived: dict[Key, float] = {}

    def come_and_work() -> bool:
        while machine.now_ms >= 500.0 * len(arrived):
            name = key(f"short-{len(arrived)}")
            arrived[name] = machine.now_ms
            scheduler.add_prompt(name, num_tokens=20, num_computed=0)
        return key("long") in machine.done_ms

    machine.run_until(come_and_work)
    assert machine.done_ms[key("long")] <= 2 * alone_ms
    chunk_ms = 512 * machine.token_ms
    waits = [machine.done_ms[name] - arrived[name] for name in arrived if name in machine.done_ms]
    assert len(waits) >= 8
    assert max(waits) <= 2 * chunk_ms


def test_steps_too_small_to_share_are_taken_in_turn() -> None:
    """F77: with a budget of one granule the long prompt has every other step, and a short one the steps between."""
    scheduler = make_scheduler(chunk_tokens=16)
    machine = Machine(scheduler)
    scheduler.add_prompt(key("long"), num_tokens=1600, num_computed=0)
    machine.step()
    scheduler.add_prompt(key("short"), num_tokens=20, num_computed=0)
    scheduler.add_prompt(key("other"), num_tokens=16, num_computed=0)
    turns = ["".join(piece.key[0] + " " for piece in machine.step().pieces) for _ in range(6)]
    assert turns == ["other ", "long ", "short ", "long ", "short long ", "long "]


def test_many_long_prompts_all_end_oldest_first() -> None:
    """Equal prompts: the oldest is never overtaken, and every one ends."""
    scheduler = make_scheduler(chunk_tokens=64)
    for number in range(6):
        scheduler.add_prompt(key(f"p{number}"), num_tokens=500, num_computed=0)
    machine = Machine(scheduler)
    machine.run_until(lambda: len(machine.done_ms) == 6)
    assert next(iter(machine.done_ms)) == key("p0")
    assert sum(plan.num_prefill_tokens for plan, _ in machine.steps) == 3000


@pytest.mark.parametrize("num_streams", [1, 4, 16])
def test_running_streams_stay_fluid_while_a_long_prompt_prefills(num_streams: int) -> None:
    """Once two steps are known, none takes 3 times what it takes without a prompt, and the prompt ends all the same."""
    scheduler = make_scheduler(chunk_tokens=512)
    machine = Machine(scheduler, decode_ms=20 + 5.0 * num_streams)
    scheduler.add_prompt(key("before"), num_tokens=300, num_computed=0)
    machine.step()
    for number in range(num_streams):
        add_stream(scheduler, f"s{number}", credit=1 << 30, room=1 << 30)
    machine.step()
    scheduler.add_prompt(key("long"), num_tokens=2048, num_computed=0)
    num_before = len(machine.steps)
    machine.run_until(lambda: key("long") in machine.done_ms)
    assert max(ms for _, ms in machine.steps[num_before:]) < 3 * machine.decode_ms
    # Not slower than it must be: at least two thirds of the time that streams leave are used.
    assert len(machine.steps) - num_before < 2048 * machine.token_ms / (0.66 * 1.2 * machine.decode_ms)
    plan = scheduler.plan()
    assert len(plan.decode) == num_streams


def test_unknown_costs_mean_the_smallest_piece() -> None:
    """Before anything was measured, a prompt beside streams takes one granule; costs are learnt from there."""
    scheduler = make_scheduler(chunk_tokens=512)
    add_stream(scheduler, "s", credit=1 << 30, room=1 << 30)
    scheduler.add_prompt(key("p"), num_tokens=4000, num_computed=0)
    machine = Machine(scheduler)
    assert machine.step().num_prefill_tokens == 16
    machine.run_until(lambda: key("p") in machine.done_ms)


def test_a_resumed_sequence_goes_first() -> None:
    """It was preempted, so it is older than all that wait."""
    scheduler = make_scheduler(chunk_tokens=32)
    scheduler.add_prompt(key("young"), num_tokens=320, num_computed=0)
    scheduler.add_prompt(key("old"), num_tokens=320, num_computed=0, is_resumed=True)
    machine = Machine(scheduler)
    machine.run_until(lambda: len(machine.done_ms) == 2)
    assert list(machine.done_ms) == [key("old"), key("young")]


def test_limits_are_checked() -> None:
    """A field that cannot be is named."""
    with pytest.raises(BadInput, match="chunk_tokens"):
        SchedulerLimits(chunk_tokens=0)
    with pytest.raises(BadInput, match="stall_ratio"):
        SchedulerLimits(stall_ratio=1.0)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 700), st.integers(0, 699)), min_size=1, max_size=12),
    st.integers(0, 5),
    st.integers(1, 300),
    st.randoms(use_true_random=False),
)
def test_every_token_is_computed_exactly_once(
    prompts: list[tuple[int, int]], num_streams: int, chunk_tokens: int, chooser: object
) -> None:
    """Whatever comes in whichever order at whichever cost: pieces cover each prompt without gap or overlap."""
    scheduler = make_scheduler(chunk_tokens=chunk_tokens)
    machine = Machine(scheduler, decode_ms=chooser.uniform(0, 50), token_ms=chooser.uniform(0, 3))  # type: ignore[attr-defined]
    for number in range(num_streams):
        add_stream(scheduler, f"s{number}", credit=1 << 30, room=1 << 30)
    expected: dict[Key, tuple[int, int]] = {}
    for number, (num_tokens, computed) in enumerate(prompts):
        expected[key(f"p{number}")] = (min(computed, num_tokens - 1), num_tokens)
        scheduler.add_prompt(key(f"p{number}"), num_tokens=num_tokens, num_computed=min(computed, num_tokens - 1))
        if chooser.random() < 0.5:  # type: ignore[attr-defined]
            machine.step()
    machine.run_until(lambda: len(machine.done_ms) == len(expected), steps_max=20_000)
    at = {name: start for name, (start, _) in expected.items()}
    for plan, _ in machine.steps:
        assert plan.num_prefill_tokens <= max(chunk_tokens, 16) + 15
        for piece in plan.pieces:
            assert piece.start == at[piece.key] < piece.stop
            at[piece.key] = piece.stop
            assert piece.is_last == (piece.stop == expected[piece.key][1])
    assert at == {name: stop for name, (_, stop) in expected.items()}
