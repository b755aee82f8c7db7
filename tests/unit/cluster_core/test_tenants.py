"""Tenants: their keys, and what each of them may use at a time and a minute."""

from __future__ import annotations

import random

import pytest

from cluster.core.tenants import Key, KeyRing, Tenant, TenantMeter, digest_of_key, salt_bytes
from kvstore.core.quota import tenant_of
from kvstore.errors import BadInput

S = 1_000_000_000


def make_tenant(name: str = "acme", **limits: int) -> Tenant:
    return Tenant(name=name, salt=salt_bytes(name, None), **limits)


def test_concurrency_is_bounded_and_given_back() -> None:
    """The third of two is refused; after one has left there is room."""
    meter, tenant = TenantMeter(), make_tenant(max_concurrency=2)
    assert meter.admit(tenant, "a", num_tokens=1, now_ns=0) is None
    assert meter.admit(tenant, "b", num_tokens=1, now_ns=0) is None
    refused = meter.admit(tenant, "c", num_tokens=1, now_ns=0)
    assert refused is not None and (refused.status, refused.code) == (429, "concurrency_limit")
    assert meter.admit(make_tenant("other", max_concurrency=2), "d", num_tokens=1, now_ns=0) is None
    meter.leave("a", used_tokens=1, now_ns=S)
    assert meter.admit(tenant, "c", num_tokens=1, now_ns=S) is None
    meter.check_invariants()


def test_a_request_of_many_choices_takes_many_places_but_is_never_refused_for_ever() -> None:
    """Eight choices wait for an empty house and then have it to themselves."""
    meter, tenant = TenantMeter(), make_tenant(max_concurrency=4)
    assert meter.admit(tenant, "a", num_tokens=1, num_choices=3, now_ns=0) is None
    assert meter.admit(tenant, "b", num_tokens=1, num_choices=2, now_ns=0) is not None
    meter.leave("a", used_tokens=1, now_ns=0)
    assert meter.admit(tenant, "b", num_tokens=1, num_choices=8, now_ns=0) is None
    assert meter.admit(tenant, "c", num_tokens=1, now_ns=0) is not None


def test_tokens_refill_and_the_stated_wait_is_exact() -> None:
    """60 a minute is one a second: 60 are gone, 10 more need ten seconds, not nine."""
    meter, tenant = TenantMeter(), make_tenant(tokens_per_minute=60)
    assert meter.admit(tenant, "a", num_tokens=60, now_ns=0) is None
    meter.leave("a", used_tokens=60, now_ns=0)
    refused = meter.admit(tenant, "b", num_tokens=10, now_ns=0)
    assert refused is not None and (refused.code, refused.retry_after_s) == ("rate_limit_exceeded", 10)
    assert meter.admit(tenant, "b", num_tokens=10, now_ns=10 * S - 1) is not None
    assert meter.admit(tenant, "b", num_tokens=10, now_ns=10 * S) is None


def test_what_was_not_used_comes_back() -> None:
    """A request that may take 50 and takes 5 costs 5."""
    meter, tenant = TenantMeter(), make_tenant(tokens_per_minute=60)
    assert meter.admit(tenant, "a", num_tokens=50, now_ns=0) is None
    assert meter.admit(tenant, "b", num_tokens=50, now_ns=0) is not None
    meter.leave("a", used_tokens=5, now_ns=0)
    assert meter.admit(tenant, "b", num_tokens=55, now_ns=0) is None
    assert meter.admit(tenant, "c", num_tokens=1, now_ns=0) is not None


def test_a_request_larger_than_a_minute_passes_when_all_is_there_and_is_paid_for() -> None:
    """1,000 tokens at 60 a minute: admitted alone; afterwards the wait is long but below two minutes."""
    meter, tenant = TenantMeter(), make_tenant(tokens_per_minute=60)
    assert meter.admit(tenant, "a", num_tokens=1000, now_ns=0) is None
    meter.leave("a", used_tokens=1000, now_ns=0)
    refused = meter.admit(tenant, "b", num_tokens=60, now_ns=0)
    assert refused is not None and refused.retry_after_s == 119
    assert meter.admit(tenant, "b", num_tokens=60, now_ns=118 * S) is not None
    assert meter.admit(tenant, "b", num_tokens=60, now_ns=119 * S) is None


@pytest.mark.parametrize("seed", range(20))
def test_no_tenant_ever_uses_more_than_its_quota(seed: int) -> None:
    """Random requests over ten minutes: used tokens <= a full bucket + what ten minutes bring; waits are kept."""
    dice = random.Random(seed)
    meter, tenant = TenantMeter(), make_tenant(tokens_per_minute=600, max_concurrency=3)
    now_ns, used, inside, number = 0, 0, {}, 0
    while now_ns < 600 * S:
        now_ns += dice.randrange(2 * S)
        if inside and dice.random() < 0.5:
            name = dice.choice(sorted(inside))
            taken = dice.randint(0, inside.pop(name))
            used += taken
            meter.leave(name, used_tokens=taken, now_ns=now_ns)
        else:
            number += 1
            wanted = dice.randint(1, 400)
            refused = meter.admit(tenant, f"r{number}", num_tokens=wanted, now_ns=now_ns)
            if refused is None:
                inside[f"r{number}"] = wanted
            else:
                assert refused.retry_after_s is not None and 1 <= refused.retry_after_s < 120
        meter.check_invariants()
        assert meter.running(tenant) == len(inside) <= 3
    assert used <= 600 + 600 * now_ns // (60 * S)


def test_ingresses_share_a_limit() -> None:
    """Two ingresses grant half each."""
    meter, tenant = TenantMeter(shares=2), make_tenant(max_concurrency=4)
    assert [meter.admit(tenant, str(number), num_tokens=1, now_ns=0) is None for number in range(3)] == [1, 1, 0]


def test_salts_tell_tenants_apart() -> None:
    """By salt where one is given, else by name; a name is never taken for a salt."""
    assert salt_bytes("a", "x") == salt_bytes("b", "x")
    assert len({salt_bytes("a", None), salt_bytes("b", None), salt_bytes("c", "a"), salt_bytes("c", "name:a")}) == 4


def test_quotas_are_named_as_the_store_names_them() -> None:
    """And two tenants that share blocks cannot have two quotas."""
    a, b = make_tenant("a", kv_quota_bytes=1 << 20), make_tenant("b")
    ring = KeyRing({digest_of_key(t.name): Key(key_id=t.name, tenant=t) for t in (a, b)})
    assert ring.quotas() == {tenant_of(a.salt): 1 << 20}
    twin = Tenant(name="twin", salt=a.salt, kv_quota_bytes=5)
    with pytest.raises(BadInput, match="same salt"):
        KeyRing({b"1": Key(key_id="1", tenant=a), b"2": Key(key_id="2", tenant=twin)}).quotas()


def test_a_tenant_never_shows_its_salt() -> None:
    """Not even in the text of the object."""
    assert repr(salt_bytes("a", None)) not in repr(make_tenant("a"))
