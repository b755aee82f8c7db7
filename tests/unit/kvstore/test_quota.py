"""The tenants' book against a naive one, and the index's own charges and audit."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_slab_index import h, make_index, put

from kvstore.core.ids import TenantId
from kvstore.core.quota import NOBODY, TenantBook, tenant_of
from kvstore.core.slab_index import HolderId
from kvstore.errors import BadInput
from kvstore.store.auditor import Auditor

TENANTS = [TenantId("a"), TenantId("b"), NOBODY]


@given(
    st.lists(
        st.tuples(st.sampled_from(TENANTS), st.sampled_from(["host", "disk"]), st.integers(0, 50), st.booleans()),
        max_size=60,
    )
)
def test_the_book_is_a_sum_per_tenant(events: list[tuple[TenantId, str, int, bool]]) -> None:
    """Charges that fit and refunds of what is there: usage, room and totals are those of plain counters."""
    quota_bytes = 100
    book, model = TenantBook({TENANTS[0]: quota_bytes}), Counter[tuple[TenantId, str]]()
    for tenant, tier, num_bytes, is_charge in events:
        used = sum(count for (name, _), count in model.items() if name == tenant)
        has_room = tenant != TENANTS[0] or used + num_bytes <= quota_bytes
        assert book.has_room(tenant, num_bytes) == has_room
        if is_charge and has_room:
            book.charge(tenant, tier, num_bytes)
            model[tenant, tier] += num_bytes
        elif not is_charge and 0 < num_bytes <= model[tenant, tier]:
            book.refund(tenant, tier, num_bytes)
            model[tenant, tier] -= num_bytes
        book.check_invariants()
    for tenant in TENANTS:
        assert book.used_bytes(tenant) == sum(count for (name, _), count in model.items() if name == tenant)


def test_a_tenant_is_named_by_its_salt_which_the_name_does_not_tell() -> None:
    """No salt and an empty salt belong to nobody; names are stable and of one length."""
    assert tenant_of(None) == tenant_of(b"") == NOBODY
    assert tenant_of(b"salt of A") == tenant_of(b"salt of A") != tenant_of(b"salt of B")
    assert len(tenant_of(b"x" * 500)) == 16


def test_a_negative_quota_is_refused_by_tenant() -> None:
    """Early, with the name and the value."""
    with pytest.raises(BadInput, match="quota of tenant 'a': must not be negative"):
        TenantBook({TenantId("a"): -1})


def test_an_audit_names_what_is_wrong() -> None:
    """Each kind of damage to a running index is found by its own sentence; a good index has none."""
    index = make_index(4)
    put(index, 1, 2)
    assert index.audit(range(100)) == []
    index.match([h(1)], reader=HolderId("r"), now_ns=0, deadline_ns=5)
    index._slots.pins[0] += 1
    assert index.audit(range(4)) == ["slot 0 has 2 pins, its leases 1"]
    index._slots.pins[0] -= 1
    index._slots.generation[1] += 1
    assert index.audit(range(4)) == ["slot 1 shows generation 1 of an earlier life"]
    index._slots.generation[1] -= 1
    index._used.records[64] ^= 1
    assert index.audit(range(4)) == ["slot 1 is used but its record or bucket is damaged"]
    index._used.records[64] ^= 1
    index._slots.free.popleft()
    assert index.audit(range(0)) == [f"free + used + writing + quarantined is 3, not 4: {index.counts()}"]


def test_a_lease_that_nobody_ended_is_found() -> None:
    """A lease long past its deadline means that the node's timer was lost."""
    index, now_ns = make_index(2), [0]
    put(index, 1)
    index.match([h(1)], reader=HolderId("r"), now_ns=0, deadline_ns=5)
    loop = asyncio.new_event_loop()
    auditor = Auditor(index, loop=loop, clock_ns=lambda: now_ns[0])
    assert auditor.look() == []
    now_ns[0] = 3_000_000_000
    assert auditor.look() == ["lease 1 of r stands after its deadline"]
    assert (auditor.num_looks, auditor.num_findings) == (2, 1)
    loop.close()
