"""Which files make a checkpoint. Imports nothing heavy: whoever only needs digests must not load torch."""

from __future__ import annotations

import json
from pathlib import Path

from kvstore.errors import BadInput

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a checkpoint in a fixed order. Raises BadInput when there are none."""
    index = folder / INDEX_FILE
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise BadInput("model", str(index), "is not a valid weight index") from error
        return [folder / name for name in names]
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    raise BadInput("model", str(folder), "holds no safetensors weights")
