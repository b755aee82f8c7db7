"""What a checkpoint folder is, in three digests: weights, tokenizer, chat template.

Owns the definition of "the same model" for the KV fingerprint. A digest covers file names and contents, so that a
renamed folder keeps it and a changed weight does not. Hashing 270 MB takes a while, so results are kept beside the
model, valid only while size and modification time of every file are the same. It never trusts a name.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Final

from workers.model.files import weight_files

CACHE_FILE: Final = ".kopir-digests.json"
CHUNK_BYTES: Final = 1 << 22

TOKENIZER_FILES: Final = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
CONFIG_FILES: Final = ("config.json", "generation_config.json")


def model_digests(folder: Path) -> dict[str, str]:
    """Returns ``weights`` (configuration included), ``tokenizer`` and ``chat_template`` as SHA-256 hex.

    A checkpoint without a chat template has the digest of nothing there. Raises BadInput when there are no weights.
    """
    parts = {
        "weights": [*weight_files(folder), *_present(folder, CONFIG_FILES)],
        "tokenizer": _present(folder, TOKENIZER_FILES),
        "chat_template": _present(folder, ("chat_template.jinja", "chat_template.json")),
    }
    stamp = {
        str(path.relative_to(folder)): [path.stat().st_size, path.stat().st_mtime_ns]
        for paths in parts.values()
        for path in paths
    }
    cached = _read_cache(folder / CACHE_FILE)
    if cached.get("stamp") == stamp and set(cached.get("digests", {})) == set(parts):
        return {name: str(value) for name, value in cached["digests"].items()}
    digests = {name: _digest(folder, paths) for name, paths in parts.items()}
    _write_cache(folder / CACHE_FILE, {"stamp": stamp, "digests": digests})
    return digests


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 of one file as hex."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _digest(folder: Path, paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        name = str(path.relative_to(folder)).encode()
        digest.update(len(name).to_bytes(4, "big") + name + bytes.fromhex(file_sha256(path)))
    return digest.hexdigest()


def _present(folder: Path, names: tuple[str, ...]) -> list[Path]:
    return [folder / name for name in names if (folder / name).is_file()]


def _read_cache(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write_cache(path: Path, content: dict[str, Any]) -> None:
    # Several workers start at once; each writes its own file and renames it. A folder may be read-only.
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(content), encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
