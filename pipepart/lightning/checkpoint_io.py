"""Checkpoint files that a crash cannot break: written beside and renamed, with a digest that is checked on loading."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from pipepart.lightning.manifest import (
    CheckpointError,
    Content,
    check,
    known_contents,
    manifest_of,
    others_beside,
    write_manifest,
)

__all__ = ["CheckpointError", "SafeCheckpointIO", "manifest_of", "verify"]


class SafeCheckpointIO(TorchCheckpointIO):
    """Plain `.ckpt` files. Beside each there is a small manifest, `NAME.ckpt.sha256`, with its size and digest.

    The manifest names the new content before the file takes its place, and the old one until it has: whenever the
    process dies, the file under the name is whole and has its digest in the manifest.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if "://" in str(path) or storage_options is not None:  # object stores replace a file in one step anyway
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        part = target.with_name(f"{target.name}.part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.is_dir():
                raise CheckpointError(f"cannot write the checkpoint {target}: there is a directory of that name")
            with open(part, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            content = Content.of(part)
            write_manifest(target, {target.name: [content, *_written_before(target)][:2]})
            os.replace(part, target)
            write_manifest(target, {target.name: [content]})
            _sync_directory(target.parent)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
            with suppress(OSError):
                part.unlink()
            kept = f"The one that was there before is untouched: {target}." if target.exists() else ""
            raise CheckpointError(f"the checkpoint {target} could not be written: {error}. {kept}".rstrip()) from error

    def load_checkpoint(
        self, path: Any, map_location: Callable | None = lambda storage, loc: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Tensors are mapped from the file and read when they are used: a rank reads its own part of a large one."""
        if "://" in str(path):
            return super().load_checkpoint(path, map_location, weights_only)
        if not Path(path).exists():
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        try:
            return torch.load(path, map_location=map_location, weights_only=weights_only, mmap=True)  # type: ignore[arg-type]
        except Exception as error:
            if "mmap can only be used" in str(error):  # files of old versions of torch
                return super().load_checkpoint(path, map_location, weights_only)
            if "weights_only" in str(error).lower() or "Weights only" in str(error):
                raise
            raise CheckpointError(
                f"the checkpoint {path} cannot be read: {error}{others_beside(Path(path))}"
            ) from error

    def remove_checkpoint(self, path: Any) -> None:
        super().remove_checkpoint(path)
        if "://" not in str(path):
            manifest_of(Path(path)).unlink(missing_ok=True)


def verify(path: Any) -> None:
    """Hold a checkpoint file against its manifest. Files without one (from elsewhere) pass."""
    file = Path(path)
    if "://" in str(path) or not file.is_file():
        return
    contents = _written_before(file)
    if contents:
        check(file, {file: contents}, f" If it was changed on purpose, remove {manifest_of(file).name}.")


def _written_before(file: Path) -> list[Content]:
    """The contents that the manifest of a file names; none if it has no manifest that can be read."""
    try:
        return known_contents(file).get(file, [])
    except (OSError, ValueError):
        return []


def _sync_directory(path: Path) -> None:
    with suppress(OSError):  # some file systems cannot
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
