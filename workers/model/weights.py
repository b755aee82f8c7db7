"""Reads the tensors of a checkpoint folder.

Owns the names that the supported families share. Files are mapped, not read: a tensor's pages are touched when the
decoder packs it, one after the other, so that loading needs little more than the packed size. It never changes values.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvstore.errors import BadInput
from workers.model.files import weight_files


class Checkpoint:
    """Open weight files of one folder, used as a context manager. Raises BadInput when files are missing or broken."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._file_of: dict[str, object] = {}

    def __enter__(self) -> Checkpoint:
        self._open()
        return self

    def release(self) -> None:
        """Gives back the pages touched so far, once no tensor of the files is in use: they count as this process's."""
        self._stack.close()
        self._open()

    def _open(self) -> None:
        for path in weight_files(self._folder):
            try:
                handle = self._stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                self._stack.close()
                raise BadInput("model", str(path), "is not a readable safetensors file") from error
            self._file_of.update(dict.fromkeys(handle.keys(), handle))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns one tensor. Raises BadInput when it is missing or has another shape."""
        handle = self._file_of.get(name)
        if handle is None:
            raise BadInput("model", str(self._folder), f"has no tensor {name}")
        tensor: Tensor = handle.get_tensor(name)  # type: ignore[attr-defined]
        if tuple(tensor.shape) != shape:
            raise BadInput(name, tuple(tensor.shape), f"the configuration asks for shape {shape}")
        return tensor

    def maybe(self, name: str, shape: tuple[int, ...], *, wanted: bool) -> Tensor | None:
        """Returns the tensor when it is wanted. A tensor that is there unasked would be ignored silently: refused."""
        if wanted:
            return self.get(name, shape)
        if name in self:
            raise BadInput("model", str(self._folder), f"holds {name}, which its configuration does not mention")
        return None
