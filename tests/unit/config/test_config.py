"""The configuration: what a file may say, what is refused, and how the complaint reads."""

from __future__ import annotations

import pickle
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import Config, ConfigError, dump, format_bytes, load, parse_bytes, thread_budget
from kvstore.errors import BadInput

CONTRACT_YAML = """
model: smollm2-135m-instruct
served_model_name: null
dtype: bfloat16
max_model_len: 4096
server: {host: 127.0.0.1, port: 8000, keep_alive_ping_s: 0, retry_after_first_byte: false, drain_s: 20}
ingress: {replicas: 1}
workers:
  prefill:  {replicas: 1, pool_blocks: 2048, chunk_tokens: 512, threads: null}
  decode:   {replicas: 1, pool_blocks: 2048, max_num_seqs: 64, threads: null}
  combined: {replicas: 0, pool_blocks: 2048, chunk_tokens: 512, max_num_seqs: 64, threads: null}
  engine: torch
kv: {block_tokens: 16, host_bytes: 1GiB, disk_path: null, disk_bytes: 0, eviction: kopir, verify: digest,
     host_identity: auto}
attempts: {lease_ms: 2000, reservation_ms: 10000, max_attempts: 2, cluster_retry_tokens_per_s: 10,
           max_reprefill_tokens: null, deadline_ms: null}
limits: {max_queued_requests: 256, max_body_bytes: 4MiB, max_stream_backlog_tokens: 4096}
ledger: {url: "sqlite:///kopir.db"}
auth: {keys_file: null, cluster_secret_file: null}
cluster: {address: local}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "kopir.yaml"
    path.write_text(text)
    return path


def test_the_documented_file_is_read_and_the_defaults_are_what_this_version_can_do(tmp_path: Path) -> None:
    """Every key of the contract is known, and its value there is the default."""
    documented = load(write(tmp_path, CONTRACT_YAML))
    assert documented == Config() == load()


def test_later_sources_win(tmp_path: Path) -> None:
    """Defaults, file, --set, options: each overrides the one before and leaves the rest alone."""
    path = write(tmp_path, "server: {port: 1, host: filehost}\nworkers: {decode: {pool_blocks: 5}}\n")
    config = load(path, ["server.port=2", "kv={host_bytes: 2GiB}"], values={"server.port": 3})
    assert config.server.port == 3
    assert config.server.host == "filehost"
    assert config.workers.decode.pool_blocks == 5
    assert config.kv.host_bytes == 2 << 30
    assert config.kv.block_tokens == 16
    assert load(path, ["server.port=2"]).server.port == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("server:\n  prot: 1\n", "kopir.yaml:2: server.prot: unknown key; did you mean server.port?"),
        ("\nmodle: x\n", "kopir.yaml:2: modle: unknown key; did you mean model?"),
        ("port: 8000\n", "kopir.yaml:1: port: unknown key; did you mean server.port?"),
        ("zzz: 1\n", "kopir.yaml:1: zzz: unknown key; known here: model, served_model_name"),
        ("model: a\nmodel: b\n", "kopir.yaml:2: model: the key stands here twice"),
        ("server:\n  port: 70000\n", "kopir.yaml:2: server.port: expected int <= 65535, got 70000"),
        ("server:\n  port: no\n", "kopir.yaml:2: server.port: expected int, got bool"),
        ("server: 5\n", "kopir.yaml:1: server: expected a section (KEY: VALUE lines)"),
        ("- 1\n", "kopir.yaml:1: expected a section"),
        ("dtype: bfloat61\n", "kopir.yaml:1: dtype: expected one of bfloat16, float32, got 'bfloat61'; did you mean"),
        ("kv: {host_bytes: 1XB}\n", "kopir.yaml:1: kv.host_bytes: expected a size such as 4096, 512MiB or 1GiB"),
        ("kv: {host_bytes: -1}\n", "kopir.yaml:1: kv.host_bytes: expected int >= 1, got -1"),
        ("model: [a]\n", "kopir.yaml:1: model: expected str, got array"),
        ("model: null\n", "kopir.yaml:1: model: expected str, got null"),
        ("model: ''\n", "kopir.yaml:1: model: expected str of length >= 1"),
        ("a: {b\n", "kopir.yaml:2: not valid YAML"),
        ("model: !!python/object/apply:os.getcwd []\n", "kopir.yaml:1: model: could not determine a constructor"),
        ("server: {port: 2020-13-45}\n", "kopir.yaml:1: server.port: month must be in 1..12"),
        ("model: " + "[" * 5000, "kopir.yaml: not valid YAML"),
        ("<<: {model: x}\n", "kopir.yaml:1: <<: unknown key"),
        ("ledger: {url: 'mysql://x'}\n", "kopir.yaml:1: ledger.url: expected str matching"),
        ("workers:\n  prefill: {replicas: 0}\n", "kopir.yaml:2: workers.prefill.replicas: prefill and decode workers"),
        ("kv: {disk_bytes: 1GiB}\n", "kv.disk_path: a disk tier (kv.disk_bytes above 0) needs a folder"),
        ("kv: {disk_path: d}\n", "kv.disk_bytes: a disk tier (kv.disk_path is set) needs a size above 0"),
    ],
)
def test_a_bad_file_is_refused_with_key_place_and_reason(tmp_path: Path, text: str, message: str) -> None:
    """Each complaint names file, line, key and what is wrong."""
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("workers.decode.pool_block=1", "unknown key; did you mean workers.decode.pool_blocks?"),
        ("model.x=1", "model is a value, not a section"),
        ("model", "expected KEY=VALUE"),
        ("server.port=x", "server.port: expected int, got str"),
        ("server={port: 1, hots: a}", "server.hots: unknown key; did you mean server.host?"),
        ("kv.verify=[", "not valid YAML"),
    ],
)
def test_a_bad_override_is_refused_and_repeated(override: str, message: str) -> None:
    """The complaint about an override quotes it."""
    with pytest.raises(ConfigError) as caught:
        load(None, [override])
    assert str(caught.value).startswith(f"--set {override}: ")
    assert message in str(caught.value)


def test_no_worker_at_all_is_refused() -> None:
    """A cluster without workers cannot serve."""
    with pytest.raises(ConfigError, match="no worker at all"):
        load(values={"workers.prefill.replicas": 0, "workers.decode.replicas": 0})


def test_combined_workers_alone_are_enough() -> None:
    """Combined workers stand instead of pairs."""
    overrides = ["workers.prefill.replicas=0", "workers.decode.replicas=0", "workers.combined.replicas=1"]
    assert load(None, overrides).workers.combined.replicas == 1


def test_missing_and_unreadable_files_are_named(tmp_path: Path) -> None:
    """A file that is not there, a folder and binary data are refused in one line."""
    with pytest.raises(ConfigError, match=r"nothere\.yaml: cannot be read: No such file"):
        load(tmp_path / "nothere.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(tmp_path)
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(tmp_path / "b.yaml")


def test_text_that_yaml_reads_as_a_number_stays_text() -> None:
    """YAML 1.1 turns 12:30 and 007 into numbers; text fields get what was written."""
    assert load(None, ["served_model_name=12:30"]).served_model_name == "12:30"
    assert load(None, ["kv.host_identity=007"]).kv.host_identity == "007"


def test_empty_file_and_empty_section_say_nothing(tmp_path: Path) -> None:
    """An empty file, or a section with nothing below it, leaves the defaults."""
    assert load(write(tmp_path, "")) == load(write(tmp_path, "server:\n")) == Config()


def test_the_configuration_is_frozen_and_pickles() -> None:
    """It is handed to worker processes by value and cannot be changed there; its error travels too."""
    config = load(None, ["kv.block_tokens=32"])
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(AttributeError):
        config.model = "other"  # type: ignore[misc]
    error = pickle.loads(pickle.dumps(ConfigError("a", 1, "no", "f:1")))
    assert str(error) == "f:1: a: no"
    assert isinstance(error, BadInput)


@settings(deadline=None)  # a busy machine is slow, not wrong
@given(
    port=st.integers(0, 65535),
    host_bytes=st.integers(1, 1 << 50),
    name=st.one_of(st.none(), st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1)),
)
def test_dump_reads_back_equal(tmp_path_factory: pytest.TempPathFactory, port: int, host_bytes: int, name: str) -> None:
    """What ``kopir config show`` prints is a file with the same meaning."""
    config = load(values={"server.port": port, "kv.host_bytes": host_bytes, "served_model_name": name})
    assert load(write(tmp_path_factory.mktemp("c"), dump(config))) == config


@given(st.integers(0, 1 << 50))
def test_sizes_round_trip(size: int) -> None:
    """A formatted size is read back to the byte."""
    assert parse_bytes(format_bytes(size)) == size


@pytest.mark.parametrize(
    ("text", "size"),
    [("1GiB", 1 << 30), ("512 MB", 512_000_000), ("1.5kib", 1536), ("4096", 4096), ("7B", 7)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    """Decimal and binary units, with or without a space."""
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "1 G iB", "-1", "1.3B", "1e3", "1PB", "0x10", "٣MB"])
def test_texts_that_are_no_sizes_are_refused(text: str) -> None:
    """Anything else is a ValueError."""
    with pytest.raises(ValueError, match="expected a"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("cores", "overrides", "budget"),
    [
        (2, [], {"prefill": 2, "decode": 2}),
        (1, [], {"prefill": 1, "decode": 1}),
        (8, ["workers.prefill.replicas=2"], {"prefill": 4, "decode": 8}),
        (2, ["workers.decode.replicas=5"], {"prefill": 2, "decode": 1}),
        (8, ["workers.decode.threads=3"], {"prefill": 8, "decode": 3}),
        (8, ["workers.combined.replicas=1"], {"prefill": 4, "decode": 4, "combined": 4}),
        (
            6,
            ["workers.prefill.replicas=0", "workers.decode.replicas=0", "workers.combined.replicas=2"],
            {"combined": 3},
        ),
    ],
)
def test_thread_budget(cores: int, overrides: list[str], budget: dict[str, int]) -> None:
    """Sides of a pair share all cores by turns, replicas split them, a number given is taken."""
    assert thread_budget(cores, load(None, overrides)) == budget


def test_thread_budget_needs_a_core() -> None:
    """Zero cores is a caller's mistake."""
    with pytest.raises(BadInput, match="at least 1"):
        thread_budget(0, Config())


def test_defaults_satisfy_their_own_types() -> None:
    """A default outside its own range would only show when somebody wrote it down."""
    assert msgspec.convert(msgspec.to_builtins(Config()), Config) == Config()
