"""Writes the reference page of the configuration from its schema.

Owns the layout of ``docs/configuration.md``: a full file with the defaults, then one table for each section. The
words come from the schema, so that the page cannot say anything that the code does not.
"""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import yaml

from cluster.config import Config, dump, field_types, format_bytes, is_size, section_of
from cluster.config_schema import Section

_HEAD = """\
# Configuration

Generated from `cluster/config_schema.py` by `make docs`; do not edit by hand.

`kopir serve --config FILE` reads a YAML file. Any key can also be given as `--set KEY=VALUE`, for example
`--set workers.decode.pool_blocks=64`; options such as `--port` win over both. Every key is optional. A key that is
not known is refused, with the nearest known one. Sizes may carry a unit (`512MiB`, `1GB`, or plain bytes).
`kopir config check FILE` checks a file without starting anything; `kopir config show` prints what is in force.

## The whole file, with its defaults

The defaults suit a machine with two cores and no GPU.

```yaml
"""

_THREADS = """\
## Threads

`threads: null` derives the compute threads of a worker from the cores of the machine. The prefill and decode side
of a pair alternate for one request and wait passively (a waiting thread sleeps, it does not spin), so each side may
use all cores: on two cores both get 2. Replicas of one role share the cores, and combined workers that stand
beside pairs take half of them. A number is taken as it is. `kopir config show --threads` prints the result.
"""


def render_reference() -> str:
    """Returns the reference page as Markdown, ending with a newline."""
    parts = [_HEAD + dump(Config()) + "```\n"]
    parts.append("## Keys\n\n### Top level\n\n" + _table(Config))
    parts.extend(f"### `{prefix}`\n\n{_summary(section)}\n\n{_table(section)}" for prefix, section in _sections())
    parts.append(_THREADS)
    return "\n".join(parts)


def _sections(section: type[Section] = Config, prefix: str = "") -> list[tuple[str, type[Section]]]:
    """Returns every section below ``section`` with its dotted name, parents first."""
    found: list[tuple[str, type[Section]]] = []
    for name, annotation in field_types(section).items():
        inner = section_of(annotation)
        if inner is not None:
            found.append((f"{prefix}{name}", inner))
            found.extend(_sections(inner, f"{prefix}{name}."))
    return found


def _summary(section: type[Section]) -> str:
    return " ".join((section.__doc__ or "").split())


def _table(section: type[Section]) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    default = section()
    for name, annotation in field_types(section).items():
        if section_of(annotation) is None:
            cells = (f"`{name}`", _type_text(annotation), _default_text(default, name, annotation), _doc(annotation))
            rows.append("| " + " | ".join(cells) + " |")
        elif section is not Config:
            inner = section_of(annotation)
            assert inner is not None, name
            rows.append(f"| `{name}` | section | | {_summary(inner)} |")
    return "\n".join(rows) + "\n"


def _doc(annotation: Any) -> str:
    text: str = next(meta.description for meta in annotation.__metadata__ if meta.description)
    return text.replace("|", "\\|")


def _default_text(section: Section, name: str, annotation: Any) -> str:
    value = getattr(section, name)
    text = format_bytes(value) if is_size(annotation) and value is not None else yaml.safe_dump(value)
    return f"`{text.removesuffix(chr(10)).removesuffix(chr(10) + '...').strip()}`"


def _type_text(annotation: Any) -> str:
    """Returns a type and its range in words, such as ``integer, 1 to 1024, or null``."""
    if typing.get_origin(annotation) is typing.Annotated:
        base, *metas = typing.get_args(annotation)
        if is_size(annotation):
            return "size"
        text = _type_text(base)
        limits = [_limits(meta) for meta in metas]
        return ", ".join([text, *(limit for limit in limits if limit)])
    options = [part for part in typing.get_args(annotation) if part is not type(None)]
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(f"`{option}`" for option in options)
    if options:
        return ", or ".join([_type_text(option) for option in options] + ["`null`"])
    return {int: "integer", float: "number", str: "text", bool: "`true` or `false`"}[annotation]


def _limits(meta: msgspec.Meta) -> str:
    if meta.ge is None or meta.le is None:
        return ""
    if meta.le >= 1 << 40:  # Only keeps numbers within 64 bits; tells the reader nothing.
        return f"at least {meta.ge:g}"
    return f"{meta.ge:g} to {int(meta.le):,}".replace(",", " ")
