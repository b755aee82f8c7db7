"""The tools file: what it may say, and that no message holds what may be secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.cli import main as cli
from cluster.config import ConfigError
from cluster.tools_source import ServerTool, find_tools, load_tools

SECRET = "Bearer s3cr3t-of-the-tool"
SCHEMA = {"type": "object", "properties": {"room": {"type": "string"}}, "required": ["room"]}


def make_entry(**changes: Any) -> dict[str, Any]:
    entry = {
        "name": "book_room",
        "description": "Books a room.",
        "parameters": SCHEMA,
        "url": "https://rooms.example/v1/bookings?token=s3cr3t",
        "headers": {"authorization": SECRET},
        "timeout_ms": 2500,
        "side_effects": True,
        "on_unknown": "repeat_with_key",
    }
    return {name: value for name, value in (entry | changes).items() if value is not ...}


def write_tools(folder: Path, *entries: dict[str, Any]) -> Path:
    path = folder / "tools.yaml"
    path.write_text(yaml.safe_dump({"tools": list(entries)}))
    return path


def test_a_whole_file(tmp_path: Path) -> None:
    """Every field arrives; a header may lie in a file of its own; nothing secret is in the representation."""
    (tmp_path / "token").write_text(f"{SECRET}\n")
    lookup = {"on_unknown": "lookup", "lookup_url": "https://rooms.example/by-key/{key}"}
    path = write_tools(
        tmp_path,
        make_entry(),
        make_entry(name="pay", headers={}, header_files={"x-token": "token"}, tenants=["acme"], **lookup),
        {"name": "now", "url": "http://127.0.0.1:9/now", "side_effects": False},
    )
    book, pay, now = load_tools(path)
    assert (book.timeout_s, book.has_side_effects, book.on_unknown, book.max_tries) == (2.5, True, "repeat_with_key", 3)
    assert book.headers == (("authorization", SECRET),) and pay.headers == (("x-token", SECRET),)
    assert (now.on_unknown, now.has_side_effects, now.parameters) == ("repeat_with_key", False, None)
    assert book.terms().timeout_ns == 2_500_000_000
    assert "s3cr3t" not in repr((book, pay, now))
    assert load_tools(write_tools(tmp_path)) == ()


def test_tools_by_name_and_tenant(tmp_path: Path) -> None:
    """In the order asked for; a tool of other tenants is as unknown as one that there is not."""
    tools = load_tools(write_tools(tmp_path, make_entry(tenants=["acme"]), make_entry(name="pay")))
    found = find_tools(tools, ["pay", "book_room"], tenant="acme")
    assert isinstance(found, tuple) and [tool.name for tool in found] == ["pay", "book_room"]
    assert isinstance(found[0], ServerTool)
    assert find_tools(tools, ["pay", "book_room"], tenant="other") == "book_room"
    assert find_tools(tools, ["none"], tenant="acme") == "none"


BAD = [
    ({"name": "book room"}, "tools[0].name", "got 'book room'"),
    ({"name": ...}, "tools[0]", "name"),
    ({"url": ...}, "tools[0]", "url"),
    ({"url": "ftp://rooms.example/x?token=s3cr3t"}, "tools[0].url", "got 'ftp://rooms.example/x'"),
    ({"url": "rooms.example/x"}, "tools[0].url", "got 'rooms.example/x'"),
    ({"url": "https://"}, "tools[0].url", "expected an http or https URL"),
    ({"url": "https://rooms.example:99999/"}, "tools[0].url", "not a URL"),
    ({"url": "https://me:s3cr3t@rooms.example/"}, "tools[0].url", "put credentials into headers"),
    ({"timeout_ms": 0}, "tools[0].timeout_ms", "got 0"),
    ({"timeout_ms": -5}, "tools[0].timeout_ms", "got -5"),
    ({"timeout_ms": "soon"}, "tools[0].timeout_ms", "got str"),
    ({"timeout_ms": 10**9}, "tools[0].timeout_ms", "got 1000000000"),
    ({"parameters": {"type": "array"}}, "tools[0].parameters", "got type 'array'"),
    ({"parameters": {"type": "object", "properties": {"x": {"type": "strange"}}}}, "tools[0].parameters", "strange"),
    ({"parameters": "none"}, "tools[0].parameters", "got str"),
    ({"side_effects": ...}, "tools[0]", "side_effects"),
    ({"on_unknown": ...}, "tools[0].on_unknown", "repeat_with_key, lookup or human"),
    ({"on_unknown": "retry"}, "tools[0].on_unknown", "'retry'"),
    ({"on_unknown": "lookup"}, "tools[0].lookup_url", "needed with on_unknown: lookup"),
    ({"lookup_url": "https://rooms.example/{key}"}, "tools[0].lookup_url", "goes with on_unknown: lookup only"),
    (
        {"on_unknown": "lookup", "lookup_url": "https://rooms.example/?q=s3cr3t"},
        "tools[0].lookup_url",
        "expected {key} in path or query, got 'https://rooms.example/'",
    ),
    ({"max_tries": 0}, "tools[0].max_tries", "got 0"),
    ({"headers": {"a b": SECRET}}, "tools[0].headers.a b", "cannot be set"),
    ({"headers": {"Idempotency-Key": SECRET}}, "tools[0].headers.Idempotency-Key", "cannot be set"),
    ({"headers": {"x": SECRET + "\n"}}, "tools[0].headers.x", "the value is not shown"),
    ({"headers": {"x": ""}}, "tools[0].headers.x", "the value is not shown"),
    ({"headers": {"x": 5}}, "tools[0].headers[...]", "expected str"),
    ({"headers": {"x": SECRET, "X": SECRET}}, "tools[0].headers.x", "stands here twice"),
    ({"header_files": {"x": "not-there"}}, "tools[0].header_files.x", "cannot be read"),
    ({"retries": 3}, "tools[0]", "retries"),
    ({"tenants": ["a b"]}, "tools[0].tenants[0]", "got 'a b'"),
]


@pytest.mark.parametrize(("changes", "field", "words"), BAD)
def test_what_cannot_be_used_is_named(tmp_path: Path, changes: dict[str, Any], field: str, words: str) -> None:
    """Field, value and file; nothing that may be secret."""
    path = write_tools(tmp_path, make_entry(**changes))
    with pytest.raises(ConfigError) as caught:
        load_tools(path)
    assert caught.value.field == field and words in str(caught.value), str(caught.value)
    assert str(path) in str(caught.value) and "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize("text", ["tools: [", "tools: 5", "- a", "tool: []", "\xff"])
def test_a_file_that_is_none(tmp_path: Path, text: str) -> None:
    """Refused as a whole."""
    path = tmp_path / "tools.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"tools\.yaml"):
        load_tools(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tools(tmp_path / "none.yaml")


def test_a_name_that_stands_there_twice(tmp_path: Path) -> None:
    """The second is named."""
    with pytest.raises(ConfigError, match=r"tools\[1\]\.name.*'book_room' stands here twice"):
        load_tools(write_tools(tmp_path, make_entry(), make_entry()))


def test_config_check_looks_into_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`kopir config check` refuses a configuration whose tools cannot be used, before anything starts."""
    path = write_tools(tmp_path, make_entry(timeout_ms=0))
    config = tmp_path / "kopir.yaml"
    config.write_text(yaml.safe_dump({"tools": {"file": str(path)}}))
    assert cli.run(["config", "check", str(config)]) == 2
    told = capsys.readouterr().err
    assert "tools[0].timeout_ms" in told and "got 0" in told and "s3cr3t" not in told
    write_tools(tmp_path, make_entry())
    assert cli.run(["config", "check", str(config)]) == 0
