"""The curve of the transfer bench: throughput by block size, beside memcpy and digest of the same run."""

from __future__ import annotations

from pathlib import Path

from bench.report import Row
from kvstore.errors import EnvironmentProblem


def draw(rows: list[Row], path: Path) -> None:
    """Writes a PNG. Raises: EnvironmentProblem without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise EnvironmentProblem("--plot needs matplotlib; install the extra: pip install 'kopir[dev]'") from error
    sized = [row for row in rows if row["kind"] == "size"]
    plain, verified = ([row for row in sized if row["verified"] is wanted] for wanted in (False, True))
    figure, axes = pyplot.subplots(figsize=(8, 4.8))
    sizes_kib = [row["block_bytes"] / 1024 for row in plain]
    axes.plot(sizes_kib, [row["memcpy_gb_per_s"] for row in plain], "--", color="0.5", label="memcpy, one core")
    axes.plot(sizes_kib, [row["digest_gb_per_s"] for row in plain], ":", color="0.5", label="xxh3-128, one core")
    axes.plot(sizes_kib, [row["gb_per_s"] for row in plain], "o-", label="two processes, not verified")
    axes.plot(sizes_kib, [row["gb_per_s"] for row in verified], "s-", label="two processes, verified")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("block size (KiB)")
    axes.set_ylabel("GB/s, end to end")
    axes.set_title("Block transfer on one host")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
