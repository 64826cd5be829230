"""Weights in safetensors files: a mapping from the names of a module to tensors, each of which is read when it is asked for.

A folder holds one file, or several with an index (`model.safetensors.index.json`), as model libraries write them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pipepart.errors import ConfigError
from pipepart.files import load_json
from pipepart.values import shortened

__all__ = ["INDEX", "SafetensorsWeights"]

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class SafetensorsWeights(Mapping[str, torch.Tensor | None]):
    """The tensors of a safetensors file, or of a folder of them, under the names that they have in a module.

    ```python
    def configure_weights(self):
        return SafetensorsWeights("my_folder", prefix="model.", fresh=["model.head.weight", "model.head.bias"])
    ```

    A tensor of the file is called `prefix` + its name in the file. `names` gives the name in the file for each name in the
    module instead. `fresh` lists names in the module that the file does not have: their value is None, which means that the
    module fills them itself.
    """

    def __init__(
        self,
        path: str | Path,
        prefix: str = "",
        *,
        names: Mapping[str, str] | None = None,
        fresh: Sequence[str] = (),
    ) -> None:
        self._files = _files_of(Path(path))
        if names is None:
            names = {f"{prefix}{name}": name for name in self._files}
        elif lost := sorted(name for name in names.values() if name not in self._files):
            raise ConfigError(
                f"{path} has no tensor {shortened(lost[0])} ({len(lost)} of {len(names)} names are missing)."
            )
        if taken := sorted(set(fresh) & set(names)):
            raise ConfigError(
                f"{path} has {shortened(taken[0])}, which is also in `fresh`. Leave it out of one of them."
            )
        self._names: dict[str, str | None] = {**names, **dict.fromkeys(fresh)}
        self._open: tuple[Path, Any] | None = None
        self.bytes_read = 0
        """Bytes of the tensors that were read so far."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> torch.Tensor | None:
        """Read one tensor. Its memory may be that of the file, so the caller copies it."""
        stored = self._names[name]
        if stored is None:
            return None
        file = self._files[stored]
        try:
            if self._open is None or self._open[0] != file:
                self._open = file, _opened(file)
            found: torch.Tensor = self._open[1].get_tensor(stored)
        except (SafetensorError, OSError, MemoryError, ValueError) as error:
            raise ConfigError(f"{file}: the tensor {stored!r} cannot be read: {error}") from error
        self.bytes_read += found.nbytes
        return found

    def close(self) -> None:
        """Close the file that was read last."""
        self._open = None


def _opened(file: Path) -> Any:
    """Open a file. Reads go into memory of their own where the library offers it: pages of a mapped file stay until the end."""
    try:
        return safe_open(file, framework="pt", backend="pread")  # type: ignore[call-arg]
    except TypeError:  # versions before 0.8
        return safe_open(file, framework="pt")


def _files_of(path: Path) -> dict[str, Path]:
    """The file of each tensor."""
    if path.is_file():
        return dict.fromkeys(_names_in(path), path)
    if not path.is_dir():
        raise ConfigError(f"there is no file or folder {path} to read weights from.")
    if (path / INDEX).is_file():
        return _indexed(path)
    found = [path / _SINGLE] if (path / _SINGLE).is_file() else sorted(path.glob("*.safetensors"))
    if len(found) == 1:
        return dict.fromkeys(_names_in(found[0]), found[0])
    others = sorted(file.name for file in path.iterdir())[:8]
    raise ConfigError(
        f"{path} has no weights in safetensors: expected {_SINGLE}, or {INDEX} with the files that it names; found "
        f"{len(found)} files *.safetensors among {others}. Weights in other files (pytorch_model.bin) are converted by "
        "loading the model once and calling save_pretrained."
    )


def _names_in(file: Path) -> list[str]:
    try:
        return list(_opened(file).keys())
    except (SafetensorError, OSError, MemoryError, ValueError) as error:
        raise ConfigError(f"{file} is not a readable safetensors file: {error}") from error


def _indexed(folder: Path) -> dict[str, Path]:
    places = load_json(folder / INDEX, ConfigError).at("weight_map").read(Mapping[str, str])  # type: ignore[type-abstract]
    files: dict[str, Path] = {}
    for name, file in places.items():
        if Path(file).name != file:
            raise ConfigError(f"{folder / INDEX}: {shortened(file)} is not the name of a file in this folder.")
        files[name] = folder / file
    there = {entry.name for entry in folder.iterdir() if entry.is_file()}
    if lost := sorted({file.name for file in files.values()} - there):
        raise ConfigError(
            f"{folder / INDEX} names {shortened(lost[0])}, which is not in the folder: is a download incomplete?"
        )
    return files
