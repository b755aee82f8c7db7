"""Messages of the contract that the product's wire does not have yet."""

from __future__ import annotations

from msgspec import Struct


class Resend(Struct, frozen=True):
    """An ingress whose link is back asks for every token from ``next_index`` on (contract section 7)."""

    attempt_id: str
    epoch: int
    next_index: int
