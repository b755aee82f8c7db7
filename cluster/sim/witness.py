"""What a simulated world shows to those who watch it.

Models call a hook where something happens that a checker may care about; ``Witnesses`` passes it to every checker that
listens to that hook. Watching changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.core.attempt_events import Close
    from cluster.sim.client import SimRequest
    from cluster.sim.world import World

Key = tuple[str, int]
"""(attempt_id, epoch)."""


class Witness:
    """Base of all checkers: hooks that do nothing. ``violate`` reports a breach of what the checker claims."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []
        self.world: World | None = None
        """The world that is watched, once there is one."""
        self.now_ns = 0

    def violate(self, text: str) -> None:
        """Records a breach; the first few are enough."""
        if len(self.found) < 5:
            self.found.append((self.now_ns, text))

    def on_admitted(self, request: SimRequest) -> None: ...

    def on_held(self, key: Key, incarnation: str, ingress: str) -> None:
        """A decode worker took an attempt on."""

    def on_generated(self, key: Key) -> None:
        """A decode worker computed one more token."""

    def on_publish_checked(self, key: Key) -> None:
        """A holder's lease check passed: the token will be sent."""

    def on_accepted(self, request: SimRequest, key: Key, first_index: int, num_tokens: int) -> None:
        """The ingress took tokens of a frame."""

    def on_wrote(self, request: SimRequest, tokens: tuple[int, ...]) -> None:
        """Text of these tokens went towards the client."""

    def on_route_again(self, request: SimRequest) -> None: ...

    def on_closed(self, request: SimRequest, close: Close) -> None: ...

    def on_told(self, request: SimRequest, ending: str, detail: Any) -> None:
        """The client learned how its request ended."""

    def on_block_read(self, where: str, expected: bytes, actual: bytes) -> None:
        """A worker computed over a block, or took a copied one in."""

    def on_ingress_dead(self, incarnation: str) -> None: ...

    def at_rest(self, world: World) -> None:
        """Everything is healed and nothing moves any more."""


_HOOKS = tuple(name for name in vars(Witness) if name.startswith("on_"))


class Witnesses:
    """Calls each hook of those checkers that have one."""

    def __init__(self, witnesses: list[Witness]) -> None:
        self.all = witnesses
        self._listeners: dict[str, list[Witness]] = {
            hook: [w for w in witnesses if getattr(type(w), hook) is not getattr(Witness, hook)] for hook in _HOOKS
        }

    def tell(self, now_ns: int, hook: str, *facts: Any) -> None:
        """Passes one fact on."""
        for witness in self._listeners[hook]:
            witness.now_ns = now_ns
            getattr(witness, hook)(*facts)
