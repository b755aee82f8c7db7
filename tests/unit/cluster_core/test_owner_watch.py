"""Who is dead, from counters alone."""

from __future__ import annotations

from cluster.core.owner_watch import OwnerWatch, SilentOwner

SILENCE_NS = 900


def look(watch: OwnerWatch, start_ns: int, stop_ns: int, *, beats: dict[str, int]) -> list[SilentOwner]:
    """Looks every 100 ns in [start_ns, stop_ns]; returns what the last look said."""
    found: list[SilentOwner] = []
    for now_ns in range(start_ns, stop_ns + 1, 100):
        found = watch.observe(list(beats.items()), now_ns=now_ns)
    return found


def test_a_beat_that_stands_still_for_the_silence_is_death() -> None:
    """Not one look earlier, and with the beat that was seen."""
    watch = OwnerWatch("me", SILENCE_NS)
    assert look(watch, 0, 800, beats={"a": 4}) == []
    assert watch.observe([("a", 4)], now_ns=900) == [SilentOwner("a", 4)]


def test_a_beat_that_moves_starts_the_wait_anew() -> None:
    """However often: slow is not dead."""
    watch = OwnerWatch("me", SILENCE_NS)
    look(watch, 0, 800, beats={"a": 4})
    assert look(watch, 900, 1_700, beats={"a": 5}) == []
    assert watch.observe([("a", 5)], now_ns=1_800) == [SilentOwner("a", 5)]


def test_a_watcher_never_declares_itself() -> None:
    """Its own row may be old in its own eyes."""
    watch = OwnerWatch("me", SILENCE_NS)
    assert look(watch, 0, 5_000, beats={"me": 1}) == []


def test_a_watcher_that_was_blind_has_seen_no_silence() -> None:
    """A database that was away for all, or a stopped watcher: everybody gets the whole silence again."""
    watch = OwnerWatch("me", SILENCE_NS)
    look(watch, 0, 800, beats={"a": 4})
    assert watch.observe([("a", 4)], now_ns=50_000) == []
    assert look(watch, 50_100, 50_800, beats={"a": 4}) == []
    assert watch.observe([("a", 4)], now_ns=50_900) == [SilentOwner("a", 4)]


def test_an_owner_that_left_is_forgotten() -> None:
    """A row that comes back under the same name waits from its return on."""
    watch = OwnerWatch("me", SILENCE_NS)
    look(watch, 0, 500, beats={"a": 4})
    look(watch, 600, 700, beats={})
    assert look(watch, 800, 1_600, beats={"a": 4}) == []
    assert watch.observe([("a", 4)], now_ns=1_700) == [SilentOwner("a", 4)]
