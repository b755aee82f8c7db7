"""The bars of the fail-over bench: where the time between a fault and the end of a request goes, by case."""

from __future__ import annotations

from pathlib import Path

from bench.report import Row
from kvstore.errors import EnvironmentProblem

SPANS = ("detect_ms", "fence_ms", "dispatch_ms")


def draw(rows: list[Row], path: Path) -> None:
    """Writes a PNG; ``rows`` holds one per case. Raises: EnvironmentProblem without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise EnvironmentProblem("--plot needs matplotlib; install the extra: pip install 'kopir[dev]'") from error
    figure, axes = pyplot.subplots(figsize=(9, 4.2))
    names = [row["case"] for row in rows]
    left = [0.0] * len(rows)
    for span in SPANS:
        widths = [max(0.0, row.get(span) or 0.0) for row in rows]
        axes.barh(names, widths, left=left, label=span.removesuffix("_ms"))
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.barh(
        names,
        [max(0.0, row["end_ms"] - start) for row, start in zip(rows, left, strict=True)],
        left=left,
        color="0.8",
        label="run again, or tell the client",
    )
    axes.plot([row["bare_end_ms"] for row in rows], names, "k|", markersize=18, label="bare run")
    axes.set_xlabel("ms after the fault, worst of the repetitions")
    axes.invert_yaxis()
    axes.legend(fontsize="small")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
