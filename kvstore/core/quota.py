"""How much of the store each tenant uses, over all tiers, and how much it may. A pure core.

Owns the usage in bytes by tenant and tier, and the quotas. The owner of a tier charges a block when it gives it
a place and refunds it when that place is free again; a block in two tiers is charged twice, because it takes room
twice. The quota is hard: admission asks first, and what does not fit is not admitted, whoever else has room to spare.

Which tenant a block belongs to is given by its salt (``tenant_of``), which is part of the block's identity. A tenant
learns nothing of another one's blocks here: its usage depends on its own blocks alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from kvstore.core.ids import TenantId
from kvstore.errors import BadInput

NOBODY = TenantId("")
"""The tenant of blocks without a salt; it has no quota unless one is set."""

MAX_TENANTS = 1 << 16
_PERSON_TENANT = b"kopir-tenant-1"
_TENANT_BYTES = 8


def tenant_of(salt: bytes | None) -> TenantId:
    """Returns the name under which the store counts a salt: 16 hex digits; the salt cannot be read from it."""
    if not salt:
        return NOBODY
    return TenantId(hashlib.blake2b(salt, digest_size=_TENANT_BYTES, person=_PERSON_TENANT).hexdigest())


class TenantBook:
    """Usage and quotas of every tenant of one store node. Belongs to one thread."""

    def __init__(self, quotas: Mapping[TenantId, int] | None = None) -> None:
        """``quotas``: bytes per tenant; a tenant that is not named may use everything."""
        self._quotas: dict[TenantId, int] = {}
        self._usage: dict[TenantId, dict[str, int]] = {}
        self._totals: dict[TenantId, int] = {}
        self.set_quotas(quotas or {})

    def set_quotas(self, quotas: Mapping[TenantId, int]) -> None:
        """Replaces all quotas. A tenant that uses more than its new quota admits nothing until it uses less.

        Raises: BadInput naming the tenant of a negative quota, or when there are more than ``MAX_TENANTS``.
        """
        if len(quotas) > MAX_TENANTS:
            raise BadInput("quotas", len(quotas), f"at most {MAX_TENANTS} tenants")
        for tenant, quota_bytes in quotas.items():
            if quota_bytes < 0:
                raise BadInput(f"quota of tenant {tenant!r}", quota_bytes, "must not be negative")
        self._quotas = dict(quotas)

    def has_room(self, tenant: TenantId, num_bytes: int) -> bool:
        """Returns True when this tenant may use so many bytes more."""
        quota_bytes = self._quotas.get(tenant)
        if tenant not in self._totals and len(self._totals) >= MAX_TENANTS:
            return False
        return quota_bytes is None or self._totals.get(tenant, 0) + num_bytes <= quota_bytes

    def charge(self, tenant: TenantId, tier: str, num_bytes: int) -> None:
        """Counts bytes that this tenant uses in ``tier`` now. The caller has asked ``has_room``."""
        assert num_bytes >= 0, num_bytes
        tiers = self._usage.setdefault(tenant, {})
        tiers[tier] = tiers.get(tier, 0) + num_bytes
        self._totals[tenant] = self._totals.get(tenant, 0) + num_bytes

    def refund(self, tenant: TenantId, tier: str, num_bytes: int) -> None:
        """Counts bytes that are free again. What a tenant never used is forgotten altogether."""
        tiers = self._usage[tenant]
        tiers[tier] -= num_bytes
        self._totals[tenant] -= num_bytes
        assert tiers[tier] >= 0, f"tenant {tenant!r} gave back more than it had in {tier}"
        if self._totals[tenant] == 0:
            del self._totals[tenant], self._usage[tenant]

    def used_bytes(self, tenant: TenantId, tier: str | None = None) -> int:
        """Returns the bytes of one tenant, in one tier or over all."""
        return self._totals.get(tenant, 0) if tier is None else self._usage.get(tenant, {}).get(tier, 0)

    def left_bytes(self, tenant: TenantId) -> int | None:
        """Returns how much of its quota a tenant does not use, negative when it was lowered; None: it has none."""
        quota_bytes = self._quotas.get(tenant)
        return None if quota_bytes is None else quota_bytes - self._totals.get(tenant, 0)

    def usage(self) -> dict[TenantId, dict[str, int]]:
        """Returns tenant -> tier -> bytes, of tenants that use something."""
        return {tenant: dict(tiers) for tenant, tiers in self._usage.items()}

    def quotas(self) -> dict[TenantId, int]:
        """Returns tenant -> bytes, of tenants that have a quota."""
        return dict(self._quotas)

    def check_invariants(self) -> None:
        """Raises: AssertionError when totals and tiers disagree."""
        sums = {tenant: sum(tiers.values()) for tenant, tiers in self._usage.items()}
        assert sums == self._totals, (sums, self._totals)
        assert all(num_bytes >= 0 for tiers in self._usage.values() for num_bytes in tiers.values()), self._usage
