"""The error tree of Kopir.

    KopirError
    ├── BadInput (ValueError)        the caller's value is wrong; names field and value
    ├── RetryableError               the environment may recover; the same call may succeed later
    │   ├── DeadlineExceeded         a wait ran out
    │   ├── PeerLost                 the other process is gone or unreachable
    │   └── NoCapacity               every slot, block or queue place is taken
    └── FatalError                   the environment will not recover by itself
        ├── FingerprintMismatch      the other side's KV cannot be used here; names the fields
        │   └── LayoutRefused        its blocks are not what its fingerprint says; names what is wrong
        ├── ProtocolError            the other side broke the wire contract
        ├── AuthenticationError      the other side does not know the cluster secret
        └── EnvironmentProblem       something on this machine is missing or too small; says what to do

Expected outcomes are typed results, not exceptions. Third-party errors are mapped at the edge with ``from``.
Every error pickles, because Ray carries them between processes.
"""

from __future__ import annotations


class KopirError(Exception):
    """Base of every error that Kopir raises on purpose."""


class BadInput(KopirError, ValueError):
    """A value given by the caller cannot be used."""

    def __init__(self, field: str, value: object, why: str) -> None:
        super().__init__(field, value, why)
        self.field = field
        self.value = value
        self.why = why

    def __str__(self) -> str:
        return f"{self.field}: {self.why} (got {_short(self.value)})"


class RetryableError(KopirError):
    """The environment may recover; the same call may succeed later."""


class DeadlineExceeded(RetryableError):
    """A wait ran out."""


class PeerLost(RetryableError):
    """The other process is gone or unreachable."""


class NoCapacity(RetryableError):
    """Every slot, block or queue place is taken."""


class FatalError(KopirError):
    """The environment will not recover by itself."""


class FingerprintMismatch(FatalError):
    """The other side's KV cannot be used here."""

    def __init__(self, differing_fields: tuple[str, ...]) -> None:
        super().__init__(differing_fields)
        self.differing_fields = differing_fields

    def __str__(self) -> str:
        return "fingerprints differ in: " + ", ".join(self.differing_fields)


class LayoutRefused(FingerprintMismatch):
    """A probe block did not hold what the fingerprint says: the other side's KV cannot be used here."""

    def __init__(self, violations: tuple[str, ...]) -> None:
        super().__init__(("kv_layout",))
        self.args = (violations,)
        self.violations = violations

    def __str__(self) -> str:
        return "the probe block of the link is wrong: " + "; ".join(self.violations)


class ProtocolError(FatalError):
    """The other side broke the wire contract."""


class AuthenticationError(FatalError):
    """The other side does not know the cluster secret."""


class EnvironmentProblem(FatalError):
    """Something on this machine is missing or too small."""


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
