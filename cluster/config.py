"""Reads the configuration: YAML file, then ``--set`` overrides, then options of the command line.

Owns the way from text to one validated, frozen ``Config``. Every complaint names the key, what is wrong and where it
stands (file and line, or the override). Unknown and repeated keys are refused. Schema: ``cluster.config_schema``.

Never reads the environment, never writes, holds nothing at import.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import yaml

from cluster.config_schema import (
    AdmissionConfig,
    AttemptsConfig,
    AuthConfig,
    ClusterConfig,
    CombinedConfig,
    Config,
    DecodeConfig,
    IngressConfig,
    KvConfig,
    LedgerConfig,
    LimitsConfig,
    PacedConfig,
    PolicyConfig,
    PrefillConfig,
    Section,
    ServerConfig,
    ToolsConfig,
    TracingConfig,
    WorkersConfig,
    check_config,
    class_quotas,
    num_seats,
    thread_budget,
)
from kvstore.errors import BadInput

__all__ = [
    "AdmissionConfig",
    "AttemptsConfig",
    "AuthConfig",
    "ClusterConfig",
    "CombinedConfig",
    "Config",
    "ConfigError",
    "DecodeConfig",
    "IngressConfig",
    "KvConfig",
    "LedgerConfig",
    "LimitsConfig",
    "PacedConfig",
    "PolicyConfig",
    "PrefillConfig",
    "ServerConfig",
    "ToolsConfig",
    "TracingConfig",
    "WorkersConfig",
    "check_config",
    "class_quotas",
    "dump",
    "field_types",
    "format_bytes",
    "is_size",
    "load",
    "load_struct",
    "num_seats",
    "parse_bytes",
    "section_of",
    "thread_budget",
]

MAX_CONFIG_BYTES = 1 << 20
_UNIT_BYTES = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")


class ConfigError(BadInput):
    """A key or value of the configuration cannot be used; ``where`` is ``FILE:LINE``, an override, or empty."""

    def __init__(self, field: str, value: object, why: str, where: str = "") -> None:
        super().__init__(field, value, why)
        self.where = where

    def __str__(self) -> str:
        text = f"{self.field}: {self.why}" if self.field else self.why
        return f"{self.where}: {text}" if self.where else text


class _Setting(NamedTuple):
    """One validated value and the place it came from."""

    value: object
    where: str


def load(
    path: Path | str | None = None,
    overrides: Sequence[str] = (),
    *,
    values: Mapping[str, object] | None = None,
) -> Config:
    """Returns the configuration; later sources win: defaults, file, ``overrides``, ``values``.

    Args:
        path: YAML file, or None for the defaults.
        overrides: texts ``dotted.key=YAML value``, such as ``workers.decode.pool_blocks=64``.
        values: dotted keys with plain values, for options of the command line.

    Raises: ConfigError (a BadInput) naming key and place.
    """
    settings: dict[str, _Setting] = {}
    if path is not None:
        settings.update(_read_file(Path(path)))
    for override in overrides:
        settings.update(_read_override(override))
    for key, value in (values or {}).items():
        settings[key] = _Setting(_convert(value, _type_of(key, where=""), key=key, where=""), "")
    return _checked(settings)


def overlay(config: Config, overrides: Sequence[str]) -> Config:
    """Returns ``config`` with ``overrides`` as of ``load`` laid over it. Raises: ConfigError."""
    settings = {key: _Setting(value, "") for key, value in settings_of(config).items()}
    for override in overrides:
        settings.update(_read_override(override))
    return _checked(settings)


def settings_of(config: Section, prefix: str = "") -> dict[str, object]:
    """Returns dotted key -> value of every setting, in order."""
    settings: dict[str, object] = {}
    for name in field_types(type(config)):
        value = getattr(config, name)
        settings |= settings_of(value, f"{prefix}{name}.") if isinstance(value, Section) else {f"{prefix}{name}": value}
    return settings


def _checked(settings: Mapping[str, _Setting]) -> Config:
    config: Config = _build(Config, "", settings)
    try:
        check_config(config)
    except BadInput as error:
        where = settings[error.field].where if error.field in settings else ""
        raise ConfigError(error.field, error.value, error.why, where) from error
    return config


def load_struct(path: Path | str, root: type[Section]) -> tuple[Any, dict[str, str]]:
    """Returns the file as a ``root`` and, for every key that stands in it, ``FILE:LINE``.

    Raises: ConfigError naming key and place; values that must fit each other are the caller's to check.
    """
    settings = _read_file(Path(path), root)
    return _build(root, "", settings), {key: setting.where for key, setting in settings.items()}


def dump(config: Section) -> str:
    """Returns ``config`` as YAML that ``load`` reads back to an equal value; sizes in binary units where exact."""
    return yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True, width=120)


def parse_bytes(text: str) -> int:
    """Returns the number of bytes that ``1GiB``, ``512 MB`` or ``4096`` stands for.

    Raises: ValueError if it is no size or no whole number of bytes.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = _UNIT_BYTES.get(match.group(2).upper()) if match else None
    if match is None or unit is None:
        raise ValueError("expected a size such as 4096, 512MiB or 1GiB")
    size = float(match.group(1)) * unit if "." in match.group(1) else int(match.group(1)) * unit
    if size != int(size):
        raise ValueError("expected a whole number of bytes")
    return int(size)


def format_bytes(size: int) -> str:
    """Returns ``size`` with the largest binary unit that divides it: 1073741824 -> ``1GiB``, 1000 -> ``1000``."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def field_types(section: type[Section]) -> dict[str, Any]:
    """Returns name -> annotated type of a section's fields, in order."""
    return typing.get_type_hints(section, include_extras=True)


def section_of(annotation: Any) -> type[Section] | None:
    """Returns the section that a field holds, or None for a plain value."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def is_size(annotation: Any) -> bool:
    """Returns True if a field counts bytes and so may be written with a unit."""
    metas = getattr(annotation, "__metadata__", ())
    return any(meta.extra and meta.extra.get("unit") == "bytes" for meta in metas)


def _read_file(path: Path, root: type[Section] = Config) -> dict[str, _Setting]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError("", path.name, f"the file is larger than {MAX_CONFIG_BYTES} bytes", str(path))
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError("", path.name, "the file is not UTF-8 text", str(path)) from error
    except OSError as error:
        raise ConfigError("", path.name, f"cannot be read: {error.strerror}", str(path)) from error
    return dict(_walk(_compose(text, str(path)), root, "", str(path), root=root))


def _read_override(override: str) -> dict[str, _Setting]:
    key, equals, text = override.partition("=")
    key, where = key.strip(), f"--set {override}"
    if not equals:
        raise ConfigError(key, override, "expected KEY=VALUE", where)
    annotation = _type_of(key, where=where)
    node = _compose(text, where)
    section = section_of(annotation)
    if section is not None:
        return dict(_walk(node, section, f"{key}.", where))
    return {key: _Setting(_leaf(node, annotation, key=key, where=where), where)}


def _compose(text: str, where: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark and "=" not in where else ""
        raise ConfigError("", text, f"not valid YAML: {error.problem}", f"{where}{line}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError("", text, "not valid YAML", where) from error


def _walk(
    node: yaml.Node | None, section: type[Section], prefix: str, where: str, *, root: type[Section] = Config
) -> Iterator[tuple[str, _Setting]]:
    """Yields (dotted key, setting) of every value below ``node``; an empty section says nothing."""
    if node is None or node.tag == "tag:yaml.org,2002:null":
        return
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(prefix.rstrip("."), node.value, "expected a section (KEY: VALUE lines)", _at(where, node))
    fields, seen = field_types(section), set()
    for key_node, value_node in node.value:
        name, place = str(key_node.value), _at(where, key_node)
        key = f"{prefix}{name}"
        if name not in fields:
            raise ConfigError(key, name, _unknown(name, fields, prefix, root), place)
        if name in seen:
            raise ConfigError(key, name, "the key stands here twice", place)
        seen.add(name)
        inner = section_of(fields[name])
        if inner is not None:
            yield from _walk(value_node, inner, f"{key}.", where, root=root)
        else:
            yield key, _Setting(_leaf(value_node, fields[name], key=key, where=place), place)


def _at(where: str, node: yaml.Node) -> str:
    return where if where.startswith("--set") else f"{where}:{node.start_mark.line + 1}"


def _leaf(node: yaml.Node | None, annotation: Any, *, key: str, where: str) -> object:
    """Returns the validated value of a scalar node."""
    try:
        value = None if node is None else yaml.SafeLoader("").construct_document(node)
    except (yaml.YAMLError, ValueError) as error:
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(key, None, problem, where) from error
    if isinstance(node, yaml.ScalarNode) and not isinstance(value, (bool, str, type(None))) and _takes_text(annotation):
        value = node.value  # YAML 1.1 reads 12:30 as a number; a text field wants what was written.
    return _convert(value, annotation, key=key, where=where)


def _convert(value: object, annotation: Any, *, key: str, where: str) -> object:
    try:
        if is_size(annotation) and isinstance(value, str):
            value = parse_bytes(value)
        return msgspec.convert(value, annotation)
    except msgspec.ValidationError as error:
        raise ConfigError(key, value, _complaint(value, annotation, error), where) from error
    except ValueError as error:
        raise ConfigError(key, value, f"{error}, got {value!r}", where) from error


def _complaint(value: object, annotation: Any, error: Exception) -> str:
    choices = [str(choice) for choice in _choices(annotation)]
    if choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"expected one of {', '.join(choices)}, got {value!r}{hint}"
    text = str(error).replace("`", "").replace("Expected", "expected")
    return text if "got" in text else f"{text}, got {value!r}"


def _unwrap(annotation: Any) -> list[Any]:
    """Returns the plain alternatives of an annotated or optional type."""
    while typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [plain for part in typing.get_args(annotation) for plain in _unwrap(part)]
    return [annotation]


def _choices(annotation: Any) -> tuple[Any, ...]:
    plain = _unwrap(annotation)[0]
    return typing.get_args(plain) if typing.get_origin(plain) is Literal else ()


def _takes_text(annotation: Any) -> bool:
    return str in _unwrap(annotation)


def _type_of(key: str, *, where: str) -> Any:
    """Returns the type of the field that a dotted key names. Raises: ConfigError with the nearest known key."""
    annotation: Any = Config
    parts = key.split(".")
    for depth, name in enumerate(parts):
        section = section_of(annotation)
        prefix = "".join(f"{part}." for part in parts[:depth])
        if section is None:
            raise ConfigError(key, key, f"{prefix.rstrip('.')} is a value, not a section", where)
        fields = field_types(section)
        if name not in fields:
            raise ConfigError(key, name, _unknown(name, fields, prefix), where)
        annotation = fields[name]
    return annotation


def _unknown(name: str, fields: Mapping[str, Any], prefix: str, root: type[Section] = Config) -> str:
    """Returns the complaint about an unknown key: the nearest name of its section, else of the whole file."""
    near = difflib.get_close_matches(name, fields, n=1)
    if near:
        return f"unknown key; did you mean {prefix}{near[0]}?"
    every = dict(_all_keys(root, ""))
    elsewhere = [key for key, last in every.items() if last == name] or difflib.get_close_matches(
        f"{prefix}{name}", every, n=1
    )
    if elsewhere:
        return f"unknown key; did you mean {elsewhere[0]}?"
    return f"unknown key; known here: {', '.join(fields)}"


def _all_keys(section: type[Section], prefix: str) -> Iterator[tuple[str, str]]:
    for name, annotation in field_types(section).items():
        inner = section_of(annotation)
        if inner is None:
            yield f"{prefix}{name}", name
        else:
            yield from _all_keys(inner, f"{prefix}{name}.")


def _build(section: type[Section], prefix: str, settings: Mapping[str, _Setting]) -> Any:
    arguments: dict[str, Any] = {}
    for name, annotation in field_types(section).items():
        key, inner = f"{prefix}{name}", section_of(annotation)
        if inner is not None:
            arguments[name] = _build(inner, f"{key}.", settings)
        elif key in settings:
            arguments[name] = settings[key].value
    return section(**arguments)


def _plain(section: Section) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, annotation in field_types(type(section)).items():
        value = getattr(section, name)
        if isinstance(value, Section):
            plain[name] = _plain(value)
        elif isinstance(value, tuple):
            plain[name] = list(value)
        else:
            plain[name] = _plain_size(value) if is_size(annotation) else value
    return plain


def _plain_size(size: int) -> str | int:
    text = format_bytes(size)
    return int(text) if text.isdigit() else text
