"""guidellm, a public load generator, unmodified: what it says of a few seconds against the running cluster."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ..client_environments import foreign_environment, programs_of
from ..cluster import MODEL, Cluster

SECONDS = 5
DEADLINE_S = 300.0
PROMPT_TOKENS, OUTPUT_TOKENS = 48, 6


@pytest.mark.timeout(900)  # It makes the load generator's environment where it is not there.
def test_guidellm_measures_and_meets_no_error(combined: Cluster, model_folder: Path, tmp_path: Path) -> None:
    """Two requests at a time, streamed: some succeed, none fails, and the counts of tokens are those it asked for."""
    report = tmp_path / "report.json"
    done = subprocess.run(
        [
            programs_of("load") / "guidellm",
            *("benchmark", "run", "--target", combined.url, "--model", MODEL, "--processor", model_folder),
            *("--rate-type", "concurrent", "--rate", "2", "--max-seconds", str(SECONDS), "--random-seed", "7"),
            *("--data", json.dumps({"prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS})),
            *("--disable-progress", "--disable-console-outputs", "--output-path", report),
        ],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=foreign_environment()
        | {"HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1", "HOME": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests: dict[str, list[dict[str, Any]]] = benchmark["requests"]
    assert requests["errored"] == [], requests["errored"][:3]
    assert len(requests["successful"]) >= 2
    for request in requests["successful"]:
        assert request["output_tokens"] == OUTPUT_TOKENS, request
        assert request["prompt_tokens"] >= PROMPT_TOKENS, request
    combined.wait_idle()
