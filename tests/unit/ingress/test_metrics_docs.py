"""What is counted stands in docs/metrics.md and in the dashboard, under the same names and labels."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from cluster.ingress.relay_metrics import RelayMetrics

from .conftest import World

DOCS = Path(__file__).parents[3] / "docs"
ROW = re.compile(r"^\| `(kopir_\w+)` \| ([^|]+) \| (\w+) \|", re.MULTILINE)


def documented() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Returns {name: (type, labels)} of the page."""
    rows = ROW.findall((DOCS / "metrics.md").read_text())
    found = {name: (kind, () if labels == "-" else tuple(labels.split(", "))) for name, labels, kind in rows}
    assert len(found) == len(rows) > 0, "a metric stands there twice"
    return found


def counted(registry: CollectorRegistry) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Returns the same of what is registered."""
    found = {}
    for collector in registry._collector_to_names:  # the labels of a metric without samples are told nowhere else
        (family,) = collector.collect()
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] = (family.type, tuple(collector._labelnames))
    return found


async def test_the_page_the_code_and_the_endpoint_have_the_same_metrics(world: World) -> None:
    """A name, type or label that changes, comes or goes changes the page; what the endpoint shows is on it."""
    RelayMetrics(world.metrics.registry)
    assert documented() == counted(world.metrics.registry)
    answer = await world.http.get("/metrics")
    assert {name_of(family.name, family.type) for family in text_string_to_metric_families(answer.text)} <= {
        *documented(),
        # The library's own: when a counter or histogram was made.
        *(f"{name.removesuffix('_total')}_created" for name in documented()),
    }
    for name in ("transport_failures", "missed_deadlines", "invariant_breaches", "capacity_refusals"):
        assert f"\nkopir_{name}_total" in answer.text, "a series that begins with its first failure has no increase"


def name_of(name: str, kind: str) -> str:
    return f"{name}_total" if kind == "counter" and not name.endswith("_created") else name


def queries() -> list[tuple[str, str]]:
    """Returns (panel, query) of the dashboard."""
    dashboard = json.loads((DOCS / "grafana" / "kopir.json").read_text())
    return [(panel["title"], target["expr"]) for panel in dashboard["panels"] for target in panel["targets"]]


@pytest.mark.parametrize(("panel", "query"), queries())
def test_the_dashboard_asks_for_what_there_is(panel: str, query: str) -> None:
    """Every name in a query exists with that type, and so does every label that it sums by, selects or shows."""
    known = documented()
    names = re.findall(r"kopir_\w+", query)
    assert names, query
    labels = set()
    for name in names:
        plain = re.sub(r"_(bucket|sum|count)$", "", name)
        assert plain in known, f"{panel}: no metric {name}"
        kind, own = known[plain]
        assert (name != plain) == (kind == "histogram"), f"{panel}: {name} is a {kind}"
        assert ("rate(" in query or "increase(" in query) == (kind != "gauge"), f"{panel}: {query}"
        labels |= set(own) | ({"le"} if kind == "histogram" else set())
    used = {label.strip() for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(",")}
    used |= set(re.findall(r"[{,]\s*(\w+)=", query))
    assert used <= labels, f"{panel}: {used - labels}"


def test_the_dashboard_shows_the_promises_apart() -> None:
    """Row I5: each kind of failure has a place of its own, and no query adds two of them up."""
    kinds = {"transport_failures", "missed_deadlines", "invariant_breaches", "capacity_refusals"}
    of_query = [{kind for kind in kinds if f"kopir_{kind}_total" in query} for _, query in queries()]
    assert set().union(*of_query) == kinds and all(len(found) <= 1 for found in of_query)
