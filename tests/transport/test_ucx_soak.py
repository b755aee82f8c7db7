"""Long repetitions of faults at random moments. A slice runs with all tests; ``make soak`` runs all of it.

pytest tests/transport/test_ucx_soak.py --repeats 200
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from contextlib import ExitStack, nullcontext

import pytest
from cables import CUTS, CablePair, broken
from pairs import Pair

from bench.network import Place

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(1800)]

SIZES = (4096, 60_000, 368_640, 4 << 20, 16 << 20)
DEADLINE_S = 0.4
LATENESS_S = 1.0
"""What a loaded machine may add to a deadline."""


IDLE_S = 2.5
"""Longer than the transport sleeps at a time, and than UCX takes between two signs of life."""
UNDISTURBED_S = 10.0
FAR_PORT = 23_417
"""Of the far side of a cable, in a network namespace of its own."""


def wait(seconds: float) -> None:
    threading.Event().wait(seconds)


def forget(pair: Pair) -> None:
    """Gives the memory of a turn back, once the far side has its results too."""
    for side, names in ((pair.near, "rp"), (pair.far, "pr")):
        for name in names:
            if side.has(name):
                side.results(name)
        side.forget()


def until_settled(pair: Pair, deadline_s: float = 20.0) -> None:
    """Waits until nothing with the far side is outstanding on the near one."""
    end = time.monotonic() + deadline_s
    while pair.near.outstanding(pair.far_name):
        assert time.monotonic() < end, f"still outstanding: {pair.near.outstanding(pair.far_name)}"
        wait(0.001)


def test_a_sender_stopped_at_any_moment_never_writes_a_settled_slot(
    soak_pair: Pair, repeats: int, soaked: Counter[str]
) -> None:
    """Stop in mid-transfer, expire, reassign what is settled, fill, continue: the bytes stay."""
    rng = random.Random(7)
    pair = soak_pair
    for turn in range(repeats):
        size, tags = rng.choice(SIZES), [turn * 10 + index for index in range(rng.randint(1, 6))]
        pair.far.push("p", pair.near_name, tags, size)
        if rng.random() < 0.5:
            wait(rng.random() * 0.003)
            pair.stop_far()
            pair.near.receive("r", pair.far_name, tags, size, DEADLINE_S)
        else:
            pair.near.receive("r", pair.far_name, tags, size, DEADLINE_S)
            wait(rng.random() * 0.003)
            pair.stop_far()
        results = dict(zip(tags, pair.near.results("r"), strict=True))
        fenced = set(pair.near.outstanding(pair.far_name))
        assert set(results.values()) <= {"OK", "TIMEOUT"}
        assert fenced <= {tag for tag, result in results.items() if result == "TIMEOUT"}
        for tag in set(tags) - fenced:
            pair.near.fill("receive", tag, 42)
        pair.resume_far()
        until_settled(pair)
        for tag in fenced:
            pair.near.fill("receive", tag, 42)
        assert pair.far.results("p") == ["OK"] * len(tags)
        assert pair.near.probe(pair.far_name) == "ok"
        assert all(pair.near.has_only("receive", tag, 42) for tag in tags), f"turn {turn}: a late write"
        soaked.update(stops=1, blocks=len(tags), fenced_blocks=len(fenced))
        forget(pair)


def test_faults_at_random_moments_end_every_wait_and_leak_nothing(
    soak_pair: Pair, repeats: int, soaked: Counter[str]
) -> None:
    """Kill, stop and go on, lose and link again, with blocks under way in both directions."""
    rng = random.Random(11)
    pair = soak_pair
    for turn in range(repeats):
        size, count = rng.choice(SIZES), rng.randint(1, 6)
        inward, outward = ([turn * 100 + base + index for index in range(count)] for base in (0, 50))
        fault = rng.choice(("none", "kill", "stop", "lose"))
        # What is not disturbed ends well, however slow the machine: 200 MB over TCP take their time.
        deadline_s, far_deadline_s = (UNDISTURBED_S, UNDISTURBED_S) if fault == "none" else (DEADLINE_S, 2.0)
        pair.far.push("p", pair.near_name, inward, size, far_deadline_s)
        pair.far.receive("r", pair.near_name, outward, size, far_deadline_s)
        pair.near.receive("r", pair.far_name, inward, size, deadline_s)
        pair.near.push("p", pair.far_name, outward, size, deadline_s)
        deadline = time.monotonic() + deadline_s
        wait(rng.random() * 0.005)
        if fault == "kill":
            pair.kill_far()
        elif fault == "stop":
            pair.stop_far()
        elif fault == "lose":
            pair.near.peer_lost(pair.far_name, False)
            pair.far.peer_lost(pair.near_name, False)
        deadline = max(deadline, time.monotonic())
        results = pair.near.results("r") + pair.near.results("p")
        assert time.monotonic() < deadline + LATENESS_S, f"turn {turn} {fault}: late"
        assert set(results) <= {"OK", "TIMEOUT", "PEER_LOST"}, f"turn {turn} {fault}: {results}"
        if fault == "none":
            assert set(results) == {"OK"}, f"turn {turn}: {results}"
        if fault == "stop":
            pair.resume_far()
        if fault == "kill" or fault == "lose":
            # After a loss a source may still be read, so only the death of its reader settles it.
            dead = pair.far_name
            pair.kill_far()
            pair.near.peer_lost(dead, True)
            assert pair.near.outstanding(dead) == [], f"turn {turn} {fault}"
            pair.replace_far()
            assert pair.link() == ("ok", "ok")
        until_settled(pair)
        soaked.update((f"fault_{fault}", *results))
        forget(pair)


def test_a_hand_off_after_a_long_idle_time_is_not_stalled(soak_pair: Pair, repeats: int, soaked: Counter[str]) -> None:
    """F71: idle for longer than any sleep of the transport, then the blocks of 1,024 tokens: within 2 s each time,
    and neither side used a tenth of a core meanwhile. 30 times in a soak."""
    pair = soak_pair
    for turn in range(max(1, repeats * 3 // 20)):
        tags = [turn * 100 + index for index in range(64)]
        before_s, began = (pair.near.cpu_s(), pair.far.cpu_s()), time.monotonic()
        wait(IDLE_S)
        used_s = [after - before for after, before in zip((pair.near.cpu_s(), pair.far.cpu_s()), before_s, strict=True)]
        assert max(used_s) < 0.1 * (time.monotonic() - began), f"turn {turn}: {used_s} s of a core while idle"
        began = time.monotonic()
        pair.far.push("p", pair.near_name, tags, 368_640)
        pair.near.receive("r", pair.far_name, tags, 368_640)
        assert pair.near.results("r") == pair.far.results("p") == ["OK"] * 64
        took_s = time.monotonic() - began
        assert took_s < 2.0, f"turn {turn}: stalled"
        soaked["hand_offs"] += 1
        soaked["worst_us"] = max(soaked["worst_us"], round(took_s * 1e6))
        forget(pair)


def test_ten_thousand_flipped_bits_are_all_caught(soak_pair: Pair, repeats: int, soaked: Counter[str]) -> None:
    """50 a turn: with ``--repeats 200`` ten thousand, anywhere in blocks of one piece and of several."""
    rng = random.Random(13)
    for turn in range(repeats):
        size = rng.choice((4096, 60_000, 368_640, 1_200_000))
        tags = [turn * 100 + index for index in range(50)]
        flips = {tag: rng.randrange(8 * size) for tag in tags}
        soak_pair.far.push_damaged("p", soak_pair.near_name, tags, size, flips)
        soak_pair.near.receive("r", soak_pair.far_name, tags, size)
        assert soak_pair.near.results("r") == ["CORRUPT"] * 50
        soaked.update(flips=50, caught=50)
        forget(soak_pair)


def test_faults_on_a_cable_end_every_wait_and_leak_nothing(
    cable_ends: tuple[Place, Place], repeats: int, soaked: Counter[str]
) -> None:
    """Kill and restart on the same port, stop and go on, cable down and up, drops one way: at random moments, with
    blocks under way in both directions. The near process survives all of it."""
    rng = random.Random(17)
    with ExitStack() as stack:
        pair = CablePair(cable_ends, far_port=FAR_PORT)
        stack.callback(pair.end)
        assert pair.link() == ("ok", "ok")
        survivor = pair.near.pid()
        for turn in range(repeats):
            size, count = rng.choice(SIZES[:4]), rng.randint(1, 6)
            inward, outward = ([turn * 100 + base + index for index in range(count)] for base in (0, 50))
            fault = rng.choice(("none", "restart", "stop", *CUTS))
            deadline_s = DEADLINE_S if fault != "none" else UNDISTURBED_S
            pair.far.push("p", pair.near_name, inward, size, deadline_s)
            pair.far.receive("r", pair.near_name, outward, size, deadline_s)
            pair.near.receive("r", pair.far_name, inward, size, deadline_s)
            pair.near.push("p", pair.far_name, outward, size, deadline_s)
            wait(rng.random() * 0.005)
            with broken(cable_ends, fault) if fault in CUTS else nullcontext():
                if fault == "restart":
                    pair.kill_far()
                elif fault == "stop":
                    pair.stop_far()
                deadline = time.monotonic() + deadline_s
                results = pair.near.results("r") + pair.near.results("p")
                assert time.monotonic() < deadline + LATENESS_S, f"turn {turn} {fault}: late"
            assert set(results) <= {"OK", "TIMEOUT", "PEER_LOST"}, f"turn {turn} {fault}: {results}"
            if fault == "none":
                assert set(results) == {"OK"}, f"turn {turn}: {results}"
            if fault == "stop":
                pair.resume_far()
            if fault == "restart":
                dead = pair.far_name
                pair.near.peer_lost(dead, True)
                assert pair.near.outstanding(dead) == [], f"turn {turn} {fault}"
                pair.replace_far()
                assert pair.link(20.0) == ("ok", "ok"), f"turn {turn} {fault}"
            if fault in CUTS:
                pair.near.peer_lost(pair.far_name, False)
                pair.far.peer_lost(pair.near_name, False)
                assert pair.link(20.0) == ("ok", "ok"), f"turn {turn} {fault}"
            until_settled(pair)
            assert pair.near.probe(pair.far_name) == "ok", f"turn {turn} {fault}"
            soaked.update((f"fault_{fault}", *results))
            forget(pair)
        assert pair.near.pid() == survivor
