"""One simulated run as data: the cluster, the requests, the faults. A seed makes one; a file holds one.

Everything random about *what* happens is drawn here. What is drawn while it runs (message delays) comes from the same
seed, so that a scenario without its seed's faults, after shrinking, still runs the same way every time.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from cluster.sim.dice import Dice

MS = 1_000_000
SHAPE, REQUESTS, FAULTS, NETWORK, WORK, AIMS = range(6)
"""Purposes of dice."""


class Timing(Struct, frozen=True, kw_only=True):
    """How long things take."""

    lease_ms: int
    reservation_ms: int
    step_ns: int
    chunk_ns: int
    delay_ns_max: int
    copy_ns_max: int
    transfer_deadline_ms: int
    hand_off_deadline_ms: int
    detect_ns_max: int
    """A death is proved to others after at most this."""


class Shape(Struct, frozen=True, kw_only=True):
    """The cluster and its settings."""

    num_ingress: int
    num_prefill: int
    num_decode: int
    pool_blocks: int
    max_num_seqs: int
    max_waiting: int
    max_attempts: int
    max_requests: int
    backlog_tokens: int
    receiver_copies: bool
    """The get scheme: the receiver reads the sender's memory. Otherwise the sender writes into the receiver's."""
    timing: Timing


class Ask(Struct, frozen=True, kw_only=True):
    """One request of a client."""

    number: int
    at_ns: int
    ingress: int
    stream: bool
    prompt_blocks: int
    cached_blocks: int
    max_tokens: int
    eos_at: int | None = None
    """The model itself stops at this index."""
    stop_string_at: int | None = None
    """The text matches a stop string at this index."""
    silent_every: int = 0
    """Every n-th token has no text of its own until the next one comes; 0: none."""
    read_ns: int = 0
    """Time the client takes for each piece."""
    leaves_after_ns: int | None = None
    cancels: bool = False
    deadline_ns: int | None = None


class Fault(Struct, frozen=True, kw_only=True, tag=True):
    """Base of all faults."""

    at_ns: int


class Crash(Fault, frozen=True, kw_only=True, tag=True):
    """SIGKILL; a new incarnation starts ``down_ns`` later, with empty pools."""

    target: str
    down_ns: int


class Pause(Fault, frozen=True, kw_only=True, tag=True):
    """SIGSTOP, then SIGCONT."""

    target: str
    for_ns: int


class Cut(Fault, frozen=True, kw_only=True, tag=True):
    """Nothing passes from ``source`` to ``destination``; the other way too when ``both``."""

    source: str
    destination: str
    for_ns: int
    both: bool
    resets: bool
    """Connections break during the cut; otherwise what was sent arrives after it."""


class Reset(Fault, frozen=True, kw_only=True, tag=True):
    """A bare connection reset; what is under way is lost."""

    one: str
    other: str


class Chaos(Fault, frozen=True, kw_only=True, tag=True):
    """Messages are lost, doubled and overtaken, in hundredths."""

    for_ns: int
    drop: int
    double: int
    late: int
    late_ns_max: int


class Slow(Fault, frozen=True, kw_only=True, tag=True):
    """Overload: every computation of the target takes ``factor`` times as long."""

    target: str
    for_ns: int
    factor: int


class EngineFault(Fault, frozen=True, kw_only=True, tag=True):
    """The engine of a decode worker fails under everything that runs."""

    target: str


class Corrupt(Fault, frozen=True, kw_only=True, tag=True):
    """The next copies into a worker's memory land damaged."""

    target: str
    num_copies: int


class Drain(Fault, frozen=True, kw_only=True, tag=True):
    """An ingress takes nothing new, ends what still runs after ``drain_ns``, exits, and is replaced."""

    target: str
    drain_ns: int


class Aim(Struct, frozen=True, kw_only=True):
    """What happens to request ``number`` once it is in ``state``, ``after_ns`` after it came there."""

    number: int
    state: str
    what: Literal["worker_gone", "no_sign_of_life", "slow", "client_gone", "deadline", "draining"]
    role: Literal["prefill", "decode"]
    after_ns: int
    for_ns: int
    """How long it lasts, where it does."""
    hold_ns: int = 0
    """The answers of decode are held back so long, to make the state last; 0: they are not."""


AnyFault = Crash | Pause | Cut | Reset | Chaos | Slow | EngineFault | Corrupt | Drain


class Scenario(Struct, frozen=True, kw_only=True):
    """One run. ``heal_at_ns`` ends the safety phase."""

    seed: int
    shape: Shape
    asks: tuple[Ask, ...]
    faults: tuple[AnyFault, ...]
    heal_at_ns: int
    aims: tuple[Aim, ...] = ()
    level: int = 1
    """1: the cores alone; 2: the product's request driver over them."""
    mutant: str | None = None
    """A planted bug (``cluster.sim.mutants``), when the case shows one."""


AIMED, STALLED = 0.8, 0.12
"""Shares of the seeds in which most requests are aimed at, and in which senders stall over crowded pools."""
AIM_WEIGHTS = {
    "worker_gone": 5,
    "no_sign_of_life": 1,
    "slow": 4,
    "client_gone": 5,
    "deadline": 5,
    "draining": 3,
}
STATE_WEIGHTS = {"reserving": 5, "prefilling": 6, "handing_off": 10, "decoding": 7, "delivering": 7}
"""What is hard to meet by chance is aimed at more often."""
AIM_ROOM_NS = 2_000 * MS
"""After the last request of an aimed seed, before the heal: what is aimed still happens in the safety phase."""


def make_scenario(seed: int) -> Scenario:
    """Returns the scenario of a seed."""
    shape = _make_shape(Dice(seed, SHAPE))
    aiming = Dice(seed, AIMS)
    kind = aiming.below((AIMED, STALLED))
    num_asks_range = (4, 10)
    if kind == 0:
        # Room for all of them, and an ingress for those that come while the other one drains.
        shape, num_asks_range = replace(shape, num_ingress=2, max_requests=64, max_waiting=16), (22, 28)
    elif kind == 1:
        # Slots that are given up are wanted again at once.
        shape, num_asks_range = replace(shape, pool_blocks=6, receiver_copies=False, max_attempts=3), (10, 14)
    dice = Dice(seed, REQUESTS)
    asks = tuple(_make_ask(number, dice, shape) for number in range(dice.between(*num_asks_range)))
    aims: tuple[Aim, ...] = ()
    if kind == 0:
        aims = tuple(_make_aim(ask.number, aiming, shape) for ask in asks)
        asks = tuple(_target(ask, aim) for ask, aim in zip(asks, aims, strict=True))
    elif kind == 1:
        aims = tuple(_make_stall(ask, aiming, shape) for ask in asks if aiming.chance(0.4))
    dice = Dice(seed, FAULTS)
    faults = [_make_fault(dice, shape, asks) for _ in range(3 if kind == 0 else dice.between(3, 8))]
    if dice.chance(0.5):
        faults += dice.pick((_make_late_answers, _make_stalled_writer, _make_flapping_link))(dice, shape, asks)
    faults.sort(key=lambda fault: fault.at_ns)
    end_ns = max(fault.at_ns + _length_ns(fault) for fault in faults)
    last_ns = max(ask.at_ns for ask in asks) + (AIM_ROOM_NS if kind == 0 else 0)
    return Scenario(
        seed=seed,
        shape=shape,
        asks=asks,
        faults=tuple(faults),
        heal_at_ns=max(end_ns, last_ns) + dice.between(1, 500) * MS,
        aims=aims,
    )


def _make_aim(number: int, dice: Dice, shape: Shape) -> Aim:
    state = dice.pick([name for name, weight in STATE_WEIGHTS.items() for _ in range(weight)])
    what = dice.pick([name for name, weight in AIM_WEIGHTS.items() for _ in range(weight)])
    timing = shape.timing
    after_ns_max = {"reserving": MS // 4, "handing_off": MS, "prefilling": timing.chunk_ns}.get(state, 30 * MS)
    can_be_prefill = state == "prefilling" or (state == "reserving" and what == "slow")
    return Aim(
        number=number,
        state=state,
        what=what,  # type: ignore[arg-type]
        role="prefill" if can_be_prefill and dice.chance(0.5) else "decode",
        after_ns=dice.between(0, after_ns_max),
        for_ns=dice.between(1, timing.lease_ms * 2) * MS,
        hold_ns=dice.between(5, 120) * MS if state == "handing_off" or dice.chance(0.4) else 0,
    )


def _make_stall(ask: Ask, dice: Dice, shape: Shape) -> Aim:
    """A sender is stopped in the middle of its copies, for longer than anybody waits for them."""
    timing = shape.timing
    return Aim(
        number=ask.number,
        state="prefilling",
        what="no_sign_of_life",
        role="prefill",
        after_ns=dice.between(timing.chunk_ns, timing.chunk_ns * (ask.prompt_blocks + 1)),
        for_ns=(timing.transfer_deadline_ms + timing.lease_ms * dice.between(1, 3)) * MS,
    )


def _target(ask: Ask, aim: Aim) -> Ask:
    """Returns a request that reaches the state that is aimed at, if nothing else stops it."""
    changes: dict[str, Any] = {"leaves_after_ns": None, "deadline_ns": None, "at_ns": ask.at_ns * 5}
    if aim.state in ("decoding", "delivering"):
        long = {"eos_at": None, "stop_string_at": None, "max_tokens": max(ask.max_tokens, 8)}
        changes |= {"stream": aim.state == "delivering", **long}
    return replace(ask, **changes)


def _make_shape(dice: Dice) -> Shape:
    lease_ms = dice.pick((150, 300, 600, 1200))
    timing = Timing(
        lease_ms=lease_ms,
        reservation_ms=lease_ms * dice.between(2, 5),
        step_ns=dice.between(4, 40) * MS,
        chunk_ns=dice.between(4, 80) * MS,
        delay_ns_max=dice.pick((MS // 2, 2 * MS, 10 * MS)),
        copy_ns_max=dice.pick((MS, 20 * MS, 100 * MS)),
        transfer_deadline_ms=dice.pick((120, 200, 500)),
        hand_off_deadline_ms=dice.pick((200, 600)),
        detect_ns_max=dice.pick((5, 50, 400)) * MS,
    )
    return Shape(
        num_ingress=dice.between(1, 2),
        num_prefill=dice.between(1, 3),
        num_decode=dice.between(1, 3),
        pool_blocks=dice.pick((6, 8, 12, 24)),
        max_num_seqs=dice.pick((2, 4, 16)),
        max_waiting=dice.pick((2, 16)),
        max_attempts=dice.between(1, 3),
        max_requests=dice.pick((3, 64)),
        backlog_tokens=dice.pick((4, 64)),
        receiver_copies=dice.chance(0.4),
        timing=timing,
    )


def _make_ask(number: int, dice: Dice, shape: Shape) -> Ask:
    prompt_blocks = dice.between(1, 4)
    max_tokens = dice.between(1, 3) if dice.chance(0.2) else dice.between(4, 24)
    if shape.pool_blocks < 10 and dice.chance(0.8):
        prompt_blocks, max_tokens = min(prompt_blocks, 3), min(max_tokens, 12)
    return Ask(
        number=number,
        at_ns=dice.between(0, 800) * MS,
        ingress=dice.between(0, shape.num_ingress - 1),
        stream=dice.chance(0.7),
        prompt_blocks=prompt_blocks,
        cached_blocks=dice.between(0, prompt_blocks) if dice.chance(0.4) else 0,
        max_tokens=max_tokens,
        eos_at=dice.between(0, max_tokens - 1) if dice.chance(0.3) else None,
        stop_string_at=dice.between(0, max_tokens - 1) if dice.chance(0.2) else None,
        silent_every=dice.between(2, 4) if dice.chance(0.3) else 0,
        read_ns=dice.between(1, 60) * MS if dice.chance(0.2) else 0,
        leaves_after_ns=dice.between(1, 900) * MS if dice.chance(0.2) else None,
        cancels=dice.chance(0.3),
        deadline_ns=dice.between(50, 1500) * MS if dice.chance(0.15) else None,
    )


def _make_fault(dice: Dice, shape: Shape, asks: tuple[Ask, ...]) -> AnyFault:
    ingresses = [f"i{n}" for n in range(shape.num_ingress)]
    prefills = [f"p{n}" for n in range(shape.num_prefill)]
    decodes = [f"d{n}" for n in range(shape.num_decode)]
    workers = prefills + decodes
    # Most faults fall into the life of some request.
    at_ns = dice.pick(asks).at_ns + dice.skewed(0, 1500) * MS + dice.between(0, MS)
    lease_ms = shape.timing.lease_ms
    for_ns = dice.between(1, lease_ms * 3) * MS
    match dice.between(0, 13):
        case 0 | 1 | 2:
            target = dice.pick(ingresses) if dice.chance(0.15) else dice.pick(workers)
            return Crash(at_ns=at_ns, target=target, down_ns=dice.between(20, 1200) * MS)
        case 3 | 4:
            target = dice.pick(ingresses) if dice.chance(0.25) else dice.pick(workers)
            return Pause(at_ns=at_ns, target=target, for_ns=for_ns)
        case 5 | 6 | 7:
            pair = (dice.pick(workers), dice.pick(ingresses))
            if dice.chance(0.35):
                pair = (dice.pick(prefills), dice.pick(decodes))
            if dice.chance(0.5):
                pair = (pair[1], pair[0])
            return Cut(
                at_ns=at_ns,
                source=pair[0],
                destination=pair[1],
                for_ns=for_ns,
                both=dice.chance(0.5),
                resets=dice.chance(0.5),
            )
        case 8:
            return Reset(at_ns=at_ns, one=dice.pick(workers), other=dice.pick(ingresses + decodes))
        case 9 | 10:
            return Chaos(
                at_ns=at_ns,
                for_ns=for_ns,
                drop=dice.pick((0, 5, 20)),
                double=dice.pick((0, 10, 40)),
                late=dice.pick((0, 10, 40)),
                late_ns_max=dice.between(1, lease_ms * 2) * MS,
            )
        case 11:
            return Slow(at_ns=at_ns, target=dice.pick(workers), for_ns=for_ns, factor=dice.between(3, 40))
        case 12:
            if dice.chance(0.5):
                return Corrupt(at_ns=at_ns, target=dice.pick(decodes), num_copies=dice.between(1, 3))
            return EngineFault(at_ns=at_ns, target=dice.pick(decodes))
        case _:
            return Drain(at_ns=at_ns, target=dice.pick(ingresses), drain_ns=dice.between(1, 800) * MS)


def _make_late_answers(dice: Dice, shape: Shape, asks: tuple[Ask, ...]) -> list[AnyFault]:
    """Answers come late and twice while questions stop arriving: what leases fear most."""
    lease_ms = shape.timing.lease_ms
    at_ns = dice.pick(asks).at_ns + dice.between(0, 300) * MS
    chaos = Chaos(at_ns=at_ns, for_ns=lease_ms * 3 * MS, drop=0, double=60, late=60, late_ns_max=lease_ms * MS)
    cut = Cut(
        at_ns=at_ns + dice.between(0, lease_ms) * MS,
        source=f"d{dice.between(0, shape.num_decode - 1)}",
        destination=f"i{dice.between(0, shape.num_ingress - 1)}",
        for_ns=dice.between(lease_ms, lease_ms * 3) * MS,
        both=False,
        resets=False,
    )
    return [chaos, cut]


def _make_stalled_writer(dice: Dice, shape: Shape, asks: tuple[Ask, ...]) -> list[AnyFault]:
    """A sender is stopped in the middle of its copies and wakes up long after everybody gave up on them."""
    timing = shape.timing
    ask = dice.pick(asks)
    at_ns = ask.at_ns + dice.between(timing.chunk_ns, timing.chunk_ns * (ask.prompt_blocks + 1))
    for_ns = dice.between(timing.transfer_deadline_ms, timing.transfer_deadline_ms + timing.lease_ms * 4) * MS
    return [Pause(at_ns=at_ns, target=f"p{dice.between(0, shape.num_prefill - 1)}", for_ns=for_ns)]


def _make_flapping_link(dice: Dice, shape: Shape, asks: tuple[Ask, ...]) -> list[AnyFault]:
    """A connection breaks in the middle of a stream, takes frames with it, and is back within the lease."""
    ask, timing = dice.pick(asks), shape.timing
    decode, ingress = f"d{dice.between(0, shape.num_decode - 1)}", f"i{ask.ingress}"
    begin_ns = ask.at_ns + ask.prompt_blocks * timing.chunk_ns
    end_ns = begin_ns + ask.max_tokens * timing.step_ns
    faults: list[AnyFault] = []
    for _ in range(dice.between(1, 3)):
        at_ns = dice.between(begin_ns, end_ns)
        if dice.chance(0.5):
            faults.append(Reset(at_ns=at_ns, one=decode, other=ingress))
        else:
            for_ns = dice.between(5, timing.lease_ms // 2) * MS
            faults.append(Cut(at_ns=at_ns, source=decode, destination=ingress, for_ns=for_ns, both=False, resets=True))
    return faults


def _length_ns(fault: AnyFault) -> int:
    match fault:
        case Crash():
            return fault.down_ns
        case Pause() | Cut() | Chaos() | Slow():
            return fault.for_ns
        case Drain():
            return fault.drain_ns
        case _:
            return 0
