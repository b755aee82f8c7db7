"""The reference page says what the schema says."""

from __future__ import annotations

from pathlib import Path

import yaml

from cluster.config import Config, field_types, load, section_of
from cluster.config_reference import render_reference

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_the_committed_page_is_fresh() -> None:
    """``make docs`` was run after the last change of the schema."""
    assert PAGE.read_text() == render_reference(), "docs/configuration.md is stale: run `make docs`"


def test_every_key_has_a_row_with_words() -> None:
    """No key is left out, none has an empty meaning."""

    def check(section: type, prefix: str) -> None:
        for name, annotation in field_types(section).items():
            inner = section_of(annotation)
            if inner is not None:
                assert f"### `{prefix}{name}`" in page
                check(inner, f"{prefix}{name}.")
                continue
            rows = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
            assert rows, f"{prefix}{name}"
            assert all(len(row.split(" | ")[-1].strip(" |")) > 10 for row in rows)

    page = render_reference()
    check(Config, "")


def test_the_file_on_the_page_is_the_default(tmp_path: Path) -> None:
    """The YAML block can be copied as it stands."""
    block = render_reference().split("```yaml\n")[1].split("```")[0]
    path = tmp_path / "kopir.yaml"
    path.write_text(block)
    assert load(path) == Config()
    assert yaml.safe_load(block)["kv"]["host_bytes"] == "1GiB"
