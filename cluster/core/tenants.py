"""Who may use the endpoint, and how much of it: tenants, their keys, and what each of them uses now.

Pure. ``KeyRing`` is the content of a keys file, frozen; ``TenantMeter`` counts. A request takes its place and its
tokens (prompt and most that it may generate) when it is admitted, and gives back what it did not use when it ends, so
that a tenant can never use more than its quota by asking for much at once.

Tokens refill continuously. Levels are whole numbers in units of a token times the nanoseconds of a minute, so that no
rounding adds up. A request that is larger than a whole minute's quota is admitted when the level is full; the level
then falls below zero, at most so far that ``RETRY_AFTER_S_MAX`` seconds fill it again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.core.admission import Refused
from kvstore.core.ids import TenantId
from kvstore.core.quota import tenant_of
from kvstore.errors import BadInput

MINUTE_NS = 60_000_000_000
RETRY_AFTER_S_MAX = 119
"""Client libraries obey ``retry-after`` only below two minutes."""
STATES_MAX = 1 << 16
_PERSON_SALT = b"kopir-salt-1"
_MEAN_WEIGHT = 8
"""The mean duration of a tenant's requests moves by an eighth of the difference with each request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One customer. None means: no limit. ``salt`` is part of the identity of every block; empty: shared by all."""

    name: str
    salt: bytes = field(default=b"", repr=False)
    max_concurrency: int | None = None
    tokens_per_minute: int | None = None
    kv_quota_bytes: int | None = None


EVERYBODY = Tenant(name="default")
"""Who everybody is where no keys are configured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a tenant; the key itself is known to nobody here."""

    key_id: str
    tenant: Tenant
    is_revoked: bool = False


@dataclass(frozen=True, slots=True)
class KeyRing:
    """Every key, by the SHA-256 digest of its text."""

    keys: Mapping[bytes, Key]

    def find(self, text: str) -> Key | None:
        """Returns the key whose text this is. The look-up compares digests, so its time says nothing of a key."""
        return self.keys.get(digest_of_key(text))

    def quotas(self) -> dict[TenantId, int]:
        """Returns the bytes of KV that each tenant may keep in a store node, as the store names tenants.

        Raises: BadInput for two tenants of one salt with different quotas.
        """
        quotas: dict[TenantId, int] = {}
        for tenant in {key.tenant.name: key.tenant for key in self.keys.values()}.values():
            if tenant.kv_quota_bytes is None:
                continue
            known = quotas.setdefault(tenant_of(tenant.salt), tenant.kv_quota_bytes)
            if known != tenant.kv_quota_bytes:
                why = "another tenant of the same salt has another quota"
                raise BadInput(f"kv_quota_bytes of tenant {tenant.name!r}", tenant.kv_quota_bytes, why)
        return quotas


def digest_of_key(text: str) -> bytes:
    """Returns the SHA-256 digest of a key, which is all that is ever stored of it."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def salt_bytes(name: str, salt: str | None) -> bytes:
    """Returns the 32 bytes that go into block identities. A tenant without a salt gets one of its own by its name."""
    text = f"salt:{salt}" if salt is not None else f"name:{name}"
    return hashlib.blake2b(text.encode(), digest_size=32, person=_PERSON_SALT).digest()


@dataclass(slots=True)
class _Use:
    """What one tenant uses. ``level``: tokens left, in units of ``MINUTE_NS``; None: full."""

    running: int = 0
    level: int | None = None
    level_ns: int = 0
    mean_duration_ns: int = 0


@dataclass(frozen=True, slots=True)
class _Place:
    tenant: Tenant
    num_choices: int
    held_tokens: int
    admitted_ns: int


@dataclass(slots=True)
class TenantMeter:
    """Concurrency and tokens of every tenant in one ingress. Belongs to one thread.

    ``shares``: how many ingresses share the work; each one grants its part of every limit.
    """

    shares: int = 1
    _uses: dict[str, _Use] = field(default_factory=dict)
    _places: dict[str, _Place] = field(default_factory=dict)

    def admit(
        self, tenant: Tenant, request_id: str, *, num_tokens: int, num_choices: int = 1, now_ns: int
    ) -> Refused | None:
        """Takes a request in (None), or says which limit is reached and when to come back.

        ``num_tokens``: prompt plus the most that may be generated, over all choices.
        """
        assert request_id not in self._places, f"{request_id} is inside already"
        use = self._use(tenant)
        concurrency = self._share(tenant.max_concurrency)
        if concurrency is not None and use.running and use.running + num_choices > concurrency:
            wait_s = use.mean_duration_ns / max(1, use.running) / 1e9
            why = f"{use.running} answers of this tenant are under way; its limit is {concurrency}"
            return Refused(429, "concurrency_limit", why, _whole_seconds(wait_s))
        capacity = self._share(tenant.tokens_per_minute)
        held = 0
        if capacity is not None:
            self._refill(use, capacity, now_ns)
            assert use.level is not None
            held = min(num_tokens, capacity)
            missing = held * MINUTE_NS - use.level
            if missing > 0:
                why = f"the request may take {num_tokens} tokens; this tenant's limit is {capacity} a minute"
                return Refused(429, "rate_limit_exceeded", why, _whole_seconds(missing / capacity / 1e9))
            use.level -= held * MINUTE_NS
        use.running += num_choices
        self._places[request_id] = _Place(tenant, num_choices, held, now_ns)
        return None

    def leave(self, request_id: str, *, used_tokens: int, now_ns: int) -> None:
        """Gives the place back, and the tokens that were not used. Unknown requests are ignored."""
        place = self._places.pop(request_id, None)
        if place is None:
            return
        use = self._use(place.tenant)
        use.running -= place.num_choices
        use.mean_duration_ns += (now_ns - place.admitted_ns - use.mean_duration_ns) // _MEAN_WEIGHT
        capacity = self._share(place.tenant.tokens_per_minute)
        if capacity is not None and place.held_tokens:
            self._refill(use, capacity, now_ns)
            assert use.level is not None
            lowest = -capacity * MINUTE_NS * (RETRY_AFTER_S_MAX - 60) // 60
            level = use.level + (place.held_tokens - used_tokens) * MINUTE_NS
            use.level = max(lowest, min(capacity * MINUTE_NS, level))

    def running(self, tenant: Tenant) -> int:
        """Returns the answers of a tenant that are under way."""
        use = self._uses.get(tenant.name)
        return 0 if use is None else use.running

    def check_invariants(self) -> None:
        """Raises: AssertionError when places and counts disagree."""
        counts: dict[str, int] = {}
        for place in self._places.values():
            counts[place.tenant.name] = counts.get(place.tenant.name, 0) + place.num_choices
        assert counts == {name: use.running for name, use in self._uses.items() if use.running}, counts

    def _use(self, tenant: Tenant) -> _Use:
        use = self._uses.get(tenant.name)
        if use is None:
            if len(self._uses) >= STATES_MAX:
                # Only tenants that left the keys file can be so many; one with nothing under way is forgotten.
                idle = next((name for name, other in self._uses.items() if not other.running), None)
                if idle is not None:
                    del self._uses[idle]
            use = self._uses[tenant.name] = _Use()
        return use

    def _share(self, limit: int | None) -> int | None:
        return None if limit is None else max(1, limit // self.shares)

    def _refill(self, use: _Use, capacity: int, now_ns: int) -> None:
        full = capacity * MINUTE_NS
        if use.level is None:
            use.level = full
        else:
            use.level = min(full, use.level + capacity * max(0, now_ns - use.level_ns))
        use.level_ns = now_ns


def _whole_seconds(seconds: float) -> int:
    whole = int(seconds)
    return max(1, min(RETRY_AFTER_S_MAX, whole + (seconds > whole)))
