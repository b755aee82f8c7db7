"""The tools file: which HTTP endpoints the gateway may call for the model, and under what terms.

Owns reading and checking. A file that cannot be used is refused as a whole, before anything starts, with the field and
its value. Header values are secrets: no message, representation or record here ever holds one, and a URL is named
without user, password and query. Read once at the start of each ingress; a change needs a restart.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import SplitResult, urlsplit

import msgspec
from llguidance import LLMatcher
from msgspec import Meta, Struct

from cluster.config import ConfigError
from cluster.core.tool_events import OnUnknown, ToolTerms
from cluster.ingress.api.grammar import Function, ToolRules, find_unusable, tool_calls
from cluster.ingress.api.tool_format import TAGGED
from cluster.yaml_file import read_yaml

MAX_FILE_BYTES = 4 << 20
MAX_TOOLS = 128
MAX_HEADERS = 32
MAX_HEADER_CHARS = 8192
KEY_PLACE = "{key}"
"""What ``lookup_url`` has where the idempotency key goes."""
RESERVED_HEADERS = frozenset(
    {"connection", "content-length", "content-type", "host", "idempotency-key", "te", "transfer-encoding", "upgrade"}
)
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")
_STEP = re.compile(r"\.?([A-Za-z_][\w-]*)|\[(\d+|\.\.\.)\]")

Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
TenantName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class ToolEntry(Struct, kw_only=True, forbid_unknown_fields=True):
    """One tool as the file has it."""

    name: Name
    description: Annotated[str, Meta(max_length=16_384)] = ""
    parameters: dict[str, Any] | None = None
    url: Annotated[str, Meta(min_length=1, max_length=4096)]
    headers: Annotated[dict[str, str], Meta(max_length=MAX_HEADERS)] = {}
    header_files: Annotated[dict[str, str], Meta(max_length=MAX_HEADERS)] = {}
    timeout_ms: Annotated[int, Meta(ge=1, le=600_000)] = 10_000
    side_effects: bool
    on_unknown: OnUnknown | None = None
    lookup_url: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    max_tries: Annotated[int, Meta(ge=1, le=16)] = 3
    tenants: list[TenantName] | None = None


class ToolsFile(Struct, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    tools: Annotated[list[ToolEntry], Meta(max_length=MAX_TOOLS)] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTool:
    """One tool that the gateway may call."""

    name: str
    description: str
    parameters: dict[str, Any] | None
    url: str = field(repr=False)
    headers: tuple[tuple[str, str], ...] = field(repr=False, default=())
    lookup_url: str | None = field(repr=False, default=None)
    timeout_s: float
    has_side_effects: bool
    on_unknown: OnUnknown
    max_tries: int
    tenants: frozenset[str] | None = None
    """Who may ask for it; None: everybody."""

    def terms(self) -> ToolTerms:
        """Returns what decisions need to know."""
        return ToolTerms(
            name=self.name,
            has_side_effects=self.has_side_effects,
            on_unknown=self.on_unknown,
            timeout_ns=int(self.timeout_s * 1e9),
            max_tries=self.max_tries,
        )


def load_tools(path: Path | str) -> tuple[ServerTool, ...]:
    """Returns the tools of a file. Raises: ConfigError naming field, value and file."""
    content = _read(Path(path))
    where, seen = str(path), set()
    tools = []
    for index, entry in enumerate(content.tools):
        at = f"tools[{index}]"
        if entry.name in seen:
            raise ConfigError(f"{at}.name", entry.name, f"the tool {entry.name!r} stands here twice", where)
        seen.add(entry.name)
        tools.append(_tool(entry, at, where, Path(path).parent))
    return tuple(tools)


def find_tools(tools: Sequence[ServerTool], names: Sequence[str], *, tenant: str) -> tuple[ServerTool, ...] | str:
    """Returns the tools of these names in the order asked for, or the first name that this tenant cannot have."""
    known = {tool.name: tool for tool in tools if tool.tenants is None or tenant in tool.tenants}
    missing = next((name for name in names if name not in known), None)
    return missing if missing is not None else tuple(known[name] for name in names)


def _read(path: Path) -> ToolsFile:
    where = str(path)
    value = read_yaml(path, max_bytes=MAX_FILE_BYTES)
    try:
        return msgspec.convert(value, ToolsFile)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at ")
        key = place.strip("`").removeprefix("$").removeprefix(".")
        what = what.replace("`", "").replace("Expected", "expected").replace("Object contains", "contains")
        raise ConfigError(key, None, what + _got(value, key, what), where) from None


def _got(value: Any, key: str, what: str) -> str:
    """Returns what stands at ``key``, unless it may be secret or is said already."""
    if "header" in key or "got" in what or "field" in what:
        return ""
    for name, index in _STEP.findall(key):
        try:
            value = value[name] if name else value[int(index)]
        except (KeyError, IndexError, TypeError, ValueError):
            return ""
    if isinstance(value, str) and "://" in value:
        value = _shown_text(value)
    return f", got {value!r}" if isinstance(value, str | int | float | bool | None) else ""


def _tool(entry: ToolEntry, at: str, where: str, folder: Path) -> ServerTool:
    _url(entry.url, f"{at}.url", where)
    _check_parameters(entry, at, where)
    on_unknown = entry.on_unknown
    if entry.side_effects and on_unknown is None:
        why = "a tool with side effects must say what to do: repeat_with_key, lookup or human"
        raise ConfigError(f"{at}.on_unknown", None, why, where)
    if (on_unknown == "lookup") != (entry.lookup_url is not None):
        why = "needed with on_unknown: lookup" if entry.lookup_url is None else "goes with on_unknown: lookup only"
        raise ConfigError(f"{at}.lookup_url", None, why, where)
    if entry.lookup_url is not None:
        _url(entry.lookup_url, f"{at}.lookup_url", where)
        if KEY_PLACE not in urlsplit(entry.lookup_url).path + urlsplit(entry.lookup_url).query:
            why = f"expected {KEY_PLACE} in path or query, got {_shown_text(entry.lookup_url)!r}"
            raise ConfigError(f"{at}.lookup_url", None, why, where)
    return ServerTool(
        name=entry.name,
        description=entry.description,
        parameters=entry.parameters,
        url=entry.url,
        headers=_headers(entry, at, where, folder),
        lookup_url=entry.lookup_url,
        timeout_s=entry.timeout_ms / 1000,
        has_side_effects=entry.side_effects,
        on_unknown=on_unknown or "repeat_with_key",
        max_tries=entry.max_tries,
        tenants=None if entry.tenants is None else frozenset(entry.tenants),
    )


def _url(text: str, key: str, where: str) -> SplitResult:
    """Returns a URL that can be called. A message shows it without what may be secret in it."""
    try:
        url = urlsplit(text)
        host, _ = url.hostname, url.port
    except ValueError as error:
        raise ConfigError(key, None, f"not a URL: {error}", where) from None
    if url.username is not None or url.password is not None:
        raise ConfigError(key, None, "holds a user or password; put credentials into headers", where)
    if url.scheme not in ("http", "https") or not host or url.fragment or not text.isascii() or " " in text:
        raise ConfigError(key, None, f"expected an http or https URL, got {_shown_text(text)!r}", where)
    return url


def _shown_text(text: str) -> str:
    """Returns a URL without user, password and query."""
    return re.sub(r"//[^/@]*@", "//...@", text.split("?", 1)[0])


def _check_parameters(entry: ToolEntry, at: str, where: str) -> None:
    key = f"{at}.parameters"
    function = Function(name=entry.name, parameters=entry.parameters)
    if (unusable := find_unusable((function,))) is not None:
        got = (entry.parameters or {}).get("type")
        raise ConfigError(key, None, f"{unusable[1]}, got type {got!r}", where)
    try:
        problem = LLMatcher.validate_grammar(tool_calls(ToolRules(functions=(function,)), TAGGED))
    except (ValueError, TypeError, RecursionError) as error:
        problem = str(error) or type(error).__name__
    if problem and not problem.startswith("WARNING"):
        raise ConfigError(key, None, f"the schema cannot be used: {' '.join(problem.split())[:300]}", where)


def _headers(entry: ToolEntry, at: str, where: str, folder: Path) -> tuple[tuple[str, str], ...]:
    found: dict[str, tuple[str, str]] = {}
    for part, given in (("headers", entry.headers), ("header_files", entry.header_files)):
        for name, value in given.items():
            key = f"{at}.{part}.{name}"
            if not _HEADER_NAME.fullmatch(name) or name.lower() in RESERVED_HEADERS:
                raise ConfigError(key, None, f"the header {name!r} cannot be set", where)
            if name.lower() in found:
                raise ConfigError(key, None, f"the header {name!r} stands here twice", where)
            text = value if part == "headers" else _secret(folder / value, key, where)
            if not text or len(text) > MAX_HEADER_CHARS or not (text.isascii() and text.isprintable()):
                why = f"expected 1 to {MAX_HEADER_CHARS} printable ASCII characters (the value is not shown)"
                raise ConfigError(key, None, why, where)
            found[name.lower()] = (name, text)
    return tuple(found.values())


def _secret(path: Path, key: str, where: str) -> str:
    try:
        with path.open(encoding="ascii") as file:
            return file.read(MAX_HEADER_CHARS + 2).strip()
    except UnicodeDecodeError:
        raise ConfigError(key, None, f"{path} is not ASCII text", where) from None
    except OSError as error:
        raise ConfigError(key, None, f"{path} cannot be read: {error.strerror}", where) from error
