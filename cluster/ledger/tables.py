"""The tables of the ledger, for SQLite and PostgreSQL alike.

Owns names, types and the version of the schema. Times that people read are Unix milliseconds; nothing is decided by
them. ``owners.beat`` is a counter, so that a reader can see life without comparing clocks of two machines.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Index, Integer, MetaData, String, Table, Text

SCHEMA_VERSION = 1

metadata = MetaData()

schema_version = Table(
    "kopir_schema",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("version", Integer, nullable=False),
)

owners = Table(
    "kopir_owners",
    metadata,
    Column("owner", String(64), primary_key=True),
    Column("ingress_id", String(64), nullable=False),
    Column("host", String(256), nullable=False),
    Column("port", Integer, nullable=False),
    Column("beat", BigInteger, nullable=False),
    Column("registered_at_ms", BigInteger, nullable=False),
)
"""Live ingress processes; ``owner`` is an incarnation, ``beat`` grows while it lives."""

requests = Table(
    "kopir_requests",
    metadata,
    Column("request_id", String(128), primary_key=True),
    Column("tenant", String(128), nullable=False),
    Column("owner", String(64), nullable=False),
    Column("phase", String(32), nullable=False),
    Column("is_ended", Boolean, nullable=False),
    Column("first_delta_sent", Boolean, nullable=False),
    Column("delivered_output_tokens", BigInteger, nullable=False),
    Column("admitted_at_ms", BigInteger, nullable=False),
    Column("updated_at_ms", BigInteger, nullable=False),
    Column("record", Text, nullable=False),
    Index("kopir_requests_open", "owner", "is_ended"),
    Index("kopir_requests_age", "updated_at_ms"),
)
"""One row per request. ``record`` is the journal as JSON; the columns are what is asked for."""

idempotency_keys = Table(
    "kopir_idempotency_keys",
    metadata,
    Column("tenant", String(128), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("body_digest", String(64), nullable=False),
    Column("request_id", String(128), nullable=False),
    Column("owner", String(64), nullable=False),
    Column("state", String(16), nullable=False),
    Column("response", Text, nullable=True),
    Column("interruption", Text, nullable=True),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("updated_at_ms", BigInteger, nullable=False),
    Index("kopir_idempotency_keys_age", "updated_at_ms"),
)
"""One row per key of a tenant; ``state`` is running, sent, finished or interrupted."""
