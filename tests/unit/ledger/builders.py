"""Small rows."""

from __future__ import annotations

from typing import Any

from cluster.ledger.request_store import OwnerRow, RequestRow


def make_owner(name: str = "life-a", beat: int = 0, port: int = 7) -> OwnerRow:
    return OwnerRow(name, f"ingress-{name}", "127.0.0.1", port, beat)


def make_row(request_id: str = "req-1", *, owner: str = "life-a", tenant: str = "t", **changes: Any) -> RequestRow:
    """A running request that has delivered nothing; ``changes`` are fields of the row."""
    fields: dict[str, Any] = {
        "phase": "decoding",
        "is_ended": False,
        "first_delta_sent": False,
        "delivered_output_tokens": 0,
    } | changes
    record = {
        "request_id": request_id,
        "phase": fields["phase"],
        "first_delta_sent": fields["first_delta_sent"],
        "delivered_output_tokens": fields["delivered_output_tokens"],
        "attempts": [{"attempt_id": "att-1"}],
        "interruption": None,
    }
    return RequestRow(request_id=request_id, tenant=tenant, owner=owner, record=record, **fields)
