"""Tells whether a pip report would bring CUDA libraries: exit status 0 for yes, 1 for no.

Usage: ``python scripts/needs_cuda_wheels.py REPORT``, where REPORT comes from ``pip install --dry-run --report``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def needs_cuda_wheels(report: dict) -> bool:
    """Returns True if any distribution in the report is one of NVIDIA's run-time libraries."""
    names = [entry["metadata"]["name"].lower() for entry in report["install"]]
    # nvidia-ml-py is a small wrapper in pure Python that also comes without a GPU.
    return any(name.startswith("nvidia-") and name != "nvidia-ml-py" for name in names)


if __name__ == "__main__":
    sys.exit(0 if needs_cuda_wheels(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))) else 1)
