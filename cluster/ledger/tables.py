"""The tables of the ledger, for SQLite and PostgreSQL alike.

Owns names, types and the version of the schema. Times that people read are Unix milliseconds; nothing is decided by
them. ``owners.beat`` is a counter, so that a reader can see life without comparing clocks of two machines.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Index, Integer, MetaData, String, Table, Text, UniqueConstraint

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

tool_runs = Table(
    "kopir_tool_runs",
    metadata,
    Column("logical_id", String(128), primary_key=True),
    Column("tenant", String(128), nullable=False),
    Column("key", String(255), nullable=True),
    Column("body_digest", String(64), nullable=False),
    Column("request_id", String(128), nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("frozen", Text, nullable=False),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("updated_at_ms", BigInteger, nullable=False),
    UniqueConstraint("tenant", "key", name="kopir_tool_runs_key"),
    Index("kopir_tool_runs_request", "request_id"),
    Index("kopir_tool_runs_age", "updated_at_ms"),
)
"""One row per logical request with server-side tools. ``epoch`` grows with every life that takes it up: who comes with
an older one writes nothing. ``frozen``: what every life must begin with, as JSON."""

tool_calls = Table(
    "kopir_tool_calls",
    metadata,
    Column("logical_id", String(128), primary_key=True),
    Column("round_index", Integer, primary_key=True),
    Column("call_index", Integer, primary_key=True),
    Column("call_id", String(64), nullable=False),
    Column("request_id", String(128), nullable=False),
    Column("name", String(64), nullable=False),
    Column("arguments_digest", String(64), nullable=False),
    Column("state", String(16), nullable=False),
    Column("num_tries", Integer, nullable=False),
    Column("result", Text, nullable=True),
    Column("is_error", Boolean, nullable=False),
    Column("why", Text, nullable=False),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("updated_at_ms", BigInteger, nullable=False),
    Index("kopir_tool_calls_request", "request_id"),
)
"""One row per tool call; ``request_id`` is the HTTP request that recorded the intent."""
