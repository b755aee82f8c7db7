"""What can be configured: one frozen struct per section of the YAML file.

Owns names, types, ranges, defaults and the text of the reference page (``docs/configuration.md`` is generated from
the descriptions here). Reads no file, no environment and no hardware; ``cluster.config`` loads and checks.

Life cycle: read once by ``kopir serve``, handed down by value, never changed afterwards. Names are a public contract.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from kvstore.errors import BadInput

CLASSES_MAX = 16
CLASS_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

Text = Annotated[str, Meta(min_length=1, max_length=4096)]
Count = Annotated[int, Meta(ge=0, le=1 << 40)]
PositiveCount = Annotated[int, Meta(ge=1, le=1 << 40)]
PoolBlocks = Annotated[int, Meta(ge=2, le=1 << 24)]
Replicas = Annotated[int, Meta(ge=0, le=1024)]
Threads = Annotated[int, Meta(ge=1, le=1024)]
Millis = Annotated[int, Meta(ge=1, le=86_400_000)]
Seconds = Annotated[float, Meta(ge=0.0, le=86_400.0)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 50, extra={"unit": "bytes"})]
"""A size; the file may say ``1GiB``, ``512MB`` or a plain number of bytes."""
PositiveBytes = Annotated[int, Meta(ge=1, le=1 << 50, extra={"unit": "bytes"})]


def doc(text: str) -> Meta:
    """Returns the description of a field, as it appears in the reference page."""
    return Meta(description=text)


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section. The flags stand at each class again because type checkers do not inherit them."""


class ServerConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP endpoint."""

    host: Annotated[Text, doc("Address to listen on. `0.0.0.0` opens the endpoint to the network.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), doc("TCP port; 0 takes any free port.")] = 8000
    keep_alive_ping_s: Annotated[
        Seconds,
        doc(
            "Seconds between SSE comment pings while a prefill runs. 0 sends nothing before the first delta; "
            "otherwise headers and pings go out early."
        ),
    ] = 0.0
    retry_after_first_byte: Annotated[
        bool,
        doc(
            "With keep-alive pings on: `true` lets a request be repeated after a header or ping went out, as long as "
            "no delta did; `false` makes the first byte the boundary."
        ),
    ] = False
    tls_cert_file: Annotated[
        Text | None, doc("PEM file of the certificate chain; with `tls_key_file` the endpoint speaks HTTPS only.")
    ] = None
    tls_key_file: Annotated[Text | None, doc("PEM file of the certificate's private key.")] = None
    drain_s: Annotated[
        Seconds,
        doc(
            "Seconds that running requests get to finish on SIGTERM or `kopir down`; nothing new is taken meanwhile. "
            "SIGINT (Ctrl-C), a second signal and `kopir down --now` end them at once."
        ),
    ] = 20.0


class IngressConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The processes that hold client connections."""

    replicas: Annotated[int, Meta(ge=1, le=64), doc("Number of ingress processes.")] = 1


class PrefillConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers that compute the KV blocks of a prompt and its first token."""

    replicas: Annotated[Replicas, doc("Number of prefill workers.")] = 1
    pool_blocks: Annotated[
        PoolBlocks, doc("KV blocks of each worker's pool. May be smaller than `max_model_len` needs.")
    ] = 2048
    chunk_tokens: Annotated[
        Annotated[int, Meta(ge=16, le=1 << 20)],
        doc("Prompt tokens computed in one step; finished blocks travel while the next chunk runs."),
    ] = 512
    threads: Annotated[
        Threads | None, doc("Compute threads of each worker; `null` derives them from the cores (see Threads).")
    ] = None


class DecodeConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers that take over KV blocks and generate the rest of the answer."""

    replicas: Annotated[Replicas, doc("Number of decode workers.")] = 1
    pool_blocks: Annotated[
        PoolBlocks, doc("KV blocks of each worker's pool. May be smaller than `max_model_len` needs.")
    ] = 2048
    max_num_seqs: Annotated[
        Annotated[int, Meta(ge=1, le=4096)], doc("Requests that one worker decodes together in a step.")
    ] = 64
    threads: Annotated[
        Threads | None, doc("Compute threads of each worker; `null` derives them from the cores (see Threads).")
    ] = None


class CombinedConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers that prefill and decode in one process."""

    replicas: Annotated[Replicas, doc("Number of combined workers.")] = 0
    pool_blocks: Annotated[
        PoolBlocks, doc("KV blocks of each worker's pool. May be smaller than `max_model_len` needs.")
    ] = 2048
    chunk_tokens: Annotated[Annotated[int, Meta(ge=16, le=1 << 20)], doc("Prompt tokens computed in one step.")] = 512
    max_num_seqs: Annotated[
        Annotated[int, Meta(ge=1, le=4096)], doc("Requests that one worker runs together in a step.")
    ] = 64
    threads: Annotated[
        Threads | None, doc("Compute threads of each worker; `null` derives them from the cores (see Threads).")
    ] = None


class PacedConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Timing of the paced engine: no model, fixed times, so that planning and tests do not depend on cores."""

    step_ms: Annotated[Seconds, doc("Milliseconds of one decode step, whatever its batch.")] = 20.0
    prefill_ms_per_token: Annotated[Seconds, doc("Milliseconds of prefill for each token that is not cached.")] = 1.0


class WorkersConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engine processes by role. Prefill and decode go together; combined workers may stand beside or instead."""

    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
    combined: CombinedConfig = CombinedConfig()
    engine: Annotated[
        Literal["torch", "paced"], doc("`torch` runs the model; `paced` emits placeholder tokens at fixed times.")
    ] = "torch"
    paced: PacedConfig = PacedConfig()
    drain_s: Annotated[
        Seconds,
        doc("Seconds that the requests of a worker have to finish when `kopir apply` takes it out; then they are cut."),
    ] = 3600.0


class KvConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV blocks and where they are kept."""

    block_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=256)], doc("Tokens of one KV block; part of the fingerprint.")
    ] = 16
    host_bytes: Annotated[
        PositiveBytes, doc("Size of the shared host slab of each store node, taken from shared memory.")
    ] = GIB
    disk_path: Annotated[
        Text | None,
        doc("Folder of the disk tier; each store node makes a folder of its own in it. `null` for none."),
    ] = None
    disk_bytes: Annotated[Bytes, doc("Size of each store node's disk tier, allocated when it is made; 0 for none.")] = 0
    disk_sync: Annotated[
        bool,
        doc("`true`: a block counts as stored on the disk once it would survive a power cut; `false`: a crash only."),
    ] = True
    device_cache: Annotated[
        bool,
        doc("Complete blocks stay in a worker's pool after their request, until the room is needed; `false`: they go."),
    ] = True
    eviction: Annotated[
        Literal["kopir", "lru", "s3fifo", "arc"],
        doc("Which blocks leave a full tier first: `kopir` (prefixes, learned reuse), `lru`, `s3fifo` or `arc`."),
    ] = "kopir"
    verify: Annotated[
        Literal["digest", "full", "none"],
        doc(
            "`digest` compares the xxh3-128 digest of every block that moved; `full` also checks each block that "
            "landed or came from the store for numbers that are not finite, elements that nobody wrote and a touched "
            "tail; `none` trusts the transport."
        ),
    ] = "digest"
    host_identity: Annotated[
        Text,
        doc(
            "Processes with equal identity may share memory. `auto`: boot id and the network, IPC and PID namespaces; "
            "another text overrides it."
        ),
    ] = "auto"


class AttemptsConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long an attempt may live, and when a request may be tried again."""

    lease_ms: Annotated[
        Annotated[int, Meta(ge=50, le=86_400_000)],
        doc("Life of an attempt's lease on its worker; renewed every third of it."),
    ] = 2000
    reservation_ms: Annotated[Millis, doc("Life of reserved decode blocks while prefill queues or computes.")] = 10_000
    max_attempts: Annotated[
        Annotated[int, Meta(ge=1, le=16)], doc("Attempts of one request before its first delta; 1 never retries.")
    ] = 2
    cluster_retry_tokens_per_s: Annotated[
        Annotated[float, Meta(ge=0.0, le=1e9)],
        doc("Retries that the whole cluster may start each second, on average (a token bucket)."),
    ] = 10.0
    max_reprefill_tokens: Annotated[
        Count | None, doc("A retry that would compute more prompt tokens is refused; `null` for no limit.")
    ] = None
    deadline_ms: Annotated[Millis | None, doc("Time limit of a request; `null` leaves it to the client.")] = None


class LimitsConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds on what clients can make the server hold."""

    max_queued_requests: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 20)], doc("Requests that wait or run at one ingress; more get 429.")
    ] = 256
    max_body_bytes: Annotated[PositiveBytes, doc("Largest request body; a larger one gets 413.")] = 4 * MIB
    max_stream_backlog_tokens: Annotated[
        PositiveCount, doc("Tokens of a stream that may be computed ahead of what has been written; it waits beyond.")
    ] = 4096
    client_stall_ms: Annotated[
        Millis,
        doc("A stream whose client takes nothing for so long, while some is waiting for it, ends as `client_stalled`."),
    ] = 60_000


class AdmissionConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who runs now and who waits, at each ingress. A request names its class in the header `x-kopir-class`."""

    max_running: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 20)] | None,
        doc(
            "Answers under way at a time; `null`: as many as the decode workers run together, shared by the ingresses."
        ),
    ] = None
    classes: Annotated[
        Text,
        doc(
            "Classes in order of priority, each with the largest share of the answers that it may have under way. "
            "Requests that name none are of the first."
        ),
    ] = "interactive:1.0, background:0.5"
    reserve_share: Annotated[
        Annotated[float, Meta(ge=0.0, le=0.9)], doc("Share that is kept back for the first class.")
    ] = 0.1
    max_wait_ms: Annotated[
        Millis, doc("Longest wait; a request that would wait longer gets 429 at once, with the time to come back.")
    ] = 30_000


class PolicyConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The router's policy on failures. Without a file it follows from `attempts`."""

    file: Annotated[
        Text | None, doc("YAML file of the policy (see `kopir policy show`); read again whenever it changes.")
    ] = None
    reload_s: Annotated[Annotated[float, Meta(ge=0.05, le=3600.0)], doc("Seconds between two looks at the file.")] = 1.0


class LedgerConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The database of requests, keys and tool calls."""

    url: Annotated[
        Annotated[str, Meta(pattern=r"^(sqlite|postgresql)(\+\w+)?://")],
        doc(
            "SQLAlchemy URL: SQLite, or PostgreSQL when ingresses span machines. A relative file lies in the "
            "folder where `kopir serve` was started."
        ),
    ] = "sqlite:///kopir.db"
    retention_s: Annotated[Seconds, doc("Seconds that the record of an ended request is kept.")] = 86_400.0


class ToolsConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tools that the gateway itself calls for the model (see `tools.md`)."""

    file: Annotated[
        Text | None, doc("YAML file of the tools: endpoint, schema, time limit, side effects. `null` for none.")
    ] = None
    max_rounds: Annotated[
        Annotated[int, Meta(ge=1, le=64)], doc("Rounds of one answer in which the model may call tools.")
    ] = 8
    max_calls: Annotated[Annotated[int, Meta(ge=1, le=1024)], doc("Calls of one answer.")] = 32
    deadline_ms: Annotated[
        Millis, doc("Time for one answer with tools, all rounds together; no call and no round begins after it.")
    ] = 120_000
    max_result_bytes: Annotated[
        PositiveBytes, doc("Largest result of a tool; instead of a larger one the model is told that it is.")
    ] = 64 * KIB


class AuthConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who may use the endpoint and who belongs to the cluster."""

    keys_file: Annotated[
        Text | None,
        doc("YAML file of tenants and key hashes (`kopir keys`); `null` asks for no key and allows loopback only."),
    ] = None
    reload_s: Annotated[
        Annotated[float, Meta(ge=0.05, le=3600.0)], doc("Seconds between two looks at the keys file.")
    ] = 1.0
    cluster_secret_file: Annotated[
        Text | None, doc("File of the secret that processes of a cluster share; `null` makes a fresh one per start.")
    ] = None


class TracingConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenTelemetry traces. Off without a collector: then nothing of it is imported or sent."""

    otlp_endpoint: Annotated[
        Text | None,
        doc(
            "URL that takes traces by OTLP over HTTP, such as `http://collector:4318/v1/traces`; needs the extra "
            "`tracing`. `null`: no traces."
        ),
    ] = None
    sample_ratio: Annotated[
        Annotated[float, Meta(ge=0.0, le=1.0)],
        doc("Share of requests that are traced; a caller's `traceparent` decides for its own."),
    ] = 1.0
    service_name: Annotated[Text, doc("`service.name` of the traces.")] = "kopir"


class ClusterConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Ray cluster."""

    address: Annotated[Text, doc("`local` starts a cluster of its own; otherwise the address of a running one.")] = (
        "local"
    )


class Config(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that ``kopir serve`` can be told."""

    model: Annotated[Text, doc("Packaged name, folder or hub id of the model.")] = "smollm2-135m-instruct"
    served_model_name: Annotated[Text | None, doc("Name that clients use; `null` for the model's own name.")] = None
    dtype: Annotated[Literal["bfloat16", "float32"], doc("Number type of weights and KV blocks.")] = "bfloat16"
    max_model_len: Annotated[
        Annotated[int, Meta(ge=16, le=1 << 20)], doc("Most tokens of prompt and answer together.")
    ] = 4096
    server: ServerConfig = ServerConfig()
    ingress: IngressConfig = IngressConfig()
    workers: WorkersConfig = WorkersConfig()
    kv: KvConfig = KvConfig()
    attempts: AttemptsConfig = AttemptsConfig()
    limits: LimitsConfig = LimitsConfig()
    admission: AdmissionConfig = AdmissionConfig()
    policy: PolicyConfig = PolicyConfig()
    ledger: LedgerConfig = LedgerConfig()
    tools: ToolsConfig = ToolsConfig()
    auth: AuthConfig = AuthConfig()
    tracing: TracingConfig = TracingConfig()
    cluster: ClusterConfig = ClusterConfig()

    def boundary(self, *, stream: bool) -> str:
        """Returns after what nothing is repeated: ``first_delta`` of a stream, or ``first_byte``."""
        early = self.server.keep_alive_ping_s > 0 and not self.server.retry_after_first_byte
        return "first_byte" if early or not stream else "first_delta"


def check_config(config: Config) -> None:
    """Checks what no single field can: values that must fit each other.

    Raises: BadInput naming the field that has to change.
    """
    workers, kv = config.workers, config.kv
    for role, other in (("prefill", workers.decode), ("decode", workers.prefill)):
        mine = getattr(workers, role)
        if mine.replicas == 0 and other.replicas > 0:
            raise BadInput(f"workers.{role}.replicas", 0, "prefill and decode workers need each other")
    if workers.prefill.replicas + workers.decode.replicas + workers.combined.replicas == 0:
        raise BadInput("workers.prefill.replicas", 0, "no worker at all: set prefill and decode, or combined")
    class_quotas(config.admission.classes)
    endpoint = config.tracing.otlp_endpoint
    if endpoint is not None and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", endpoint):
        raise BadInput("tracing.otlp_endpoint", endpoint, "expected an http or https URL")
    cert, key = config.server.tls_cert_file, config.server.tls_key_file
    if (cert is None) != (key is None):
        missing, present = ("cert", "key") if cert is None else ("key", "cert")
        raise BadInput(f"server.tls_{missing}_file", None, f"needed beside server.tls_{present}_file")
    if kv.disk_path is None and kv.disk_bytes > 0:
        raise BadInput("kv.disk_path", None, "a disk tier (kv.disk_bytes above 0) needs a folder")
    if kv.disk_path is not None and kv.disk_bytes == 0:
        raise BadInput("kv.disk_bytes", 0, "a disk tier (kv.disk_path is set) needs a size above 0")


def class_quotas(text: str) -> dict[str, float]:
    """Returns class -> share from ``NAME:SHARE, NAME:SHARE``, in order. Raises: BadInput for ``admission.classes``."""
    quotas: dict[str, float] = {}
    for part in text.split(","):
        name, _, share_text = (piece.strip() for piece in part.partition(":"))
        try:
            share = float(share_text)
        except ValueError:
            share = 0.0
        if not (CLASS_NAME.fullmatch(name) and 0.0 < share <= 1.0) or name in quotas:
            why = "expected NAME:SHARE, NAME:SHARE with different names and shares above 0 and at most 1"
            raise BadInput("admission.classes", text, why)
        quotas[name] = share
    if len(quotas) > CLASSES_MAX:
        raise BadInput("admission.classes", text, f"at most {CLASSES_MAX} classes")
    return quotas


def num_seats(config: Config) -> int:
    """Returns how many answers may be under way at one ingress."""
    if config.admission.max_running is not None:
        return config.admission.max_running
    decode, combined = config.workers.decode, config.workers.combined
    seats = decode.replicas * decode.max_num_seqs + combined.replicas * combined.max_num_seqs
    return max(1, seats // config.ingress.replicas)


def thread_budget(cores: int, config: Config) -> dict[str, int]:
    """Returns the compute threads of each worker, by role; roles without replicas are left out.

    A number in the configuration is taken as it is. Otherwise: the prefill and decode sides of a pair alternate for
    one request and wait passively (a waiting thread sleeps, it does not spin), so each side may use all cores of
    its group. Replicas of one role run at the same time and share them. Combined workers beside pairs take half.

    Raises: BadInput if ``cores`` is below 1.
    """
    if cores < 1:
        raise BadInput("cores", cores, "must be at least 1")
    roles: dict[str, Any] = {
        "prefill": config.workers.prefill,
        "decode": config.workers.decode,
        "combined": config.workers.combined,
    }
    active = {role: section for role, section in roles.items() if section.replicas > 0}
    num_groups = len({"combined" if role == "combined" else "pair" for role in active})
    budget: dict[str, int] = {}
    for role, section in active.items():
        derived = max(1, cores // num_groups // section.replicas)
        budget[role] = derived if section.threads is None else section.threads
    return budget
