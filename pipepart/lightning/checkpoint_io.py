"""Checkpoint files that a crash cannot break: written beside and renamed, with a digest that is checked on loading."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from pipepart.errors import PipepartError

__all__ = ["CheckpointError", "SafeCheckpointIO", "digest_of", "manifest_of", "verify"]


class CheckpointError(PipepartError):
    """A checkpoint could not be written, or what is on disk is not what was written."""


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
            entry = {"bytes": part.stat().st_size, "sha256": digest_of(part)}
            _write_manifest(target, [entry, *_read_manifest(target)][:2])
            os.replace(part, target)
            _write_manifest(target, [entry])
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
            raise CheckpointError(f"the checkpoint {path} cannot be read: {error}{_others(Path(path))}") from error

    def remove_checkpoint(self, path: Any) -> None:
        super().remove_checkpoint(path)
        if "://" not in str(path):
            manifest_of(Path(path)).unlink(missing_ok=True)


def manifest_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def verify(path: Any) -> None:
    """Hold a checkpoint file against its manifest. Files without one (from elsewhere) pass."""
    file = Path(path)
    if "://" in str(path) or not file.is_file():
        return
    known = _read_manifest(file)
    if not known:
        return
    size = file.stat().st_size
    if all(entry["bytes"] != size for entry in known):
        raise CheckpointError(
            f"the checkpoint {file} is damaged: it has {size:,} bytes, and {known[0]['bytes']:,} were written "
            f"(cut off, or changed by something else).{_others(file)}"
        )
    digest = digest_of(file)
    if all(entry["sha256"] != digest for entry in known):
        raise CheckpointError(
            f"the checkpoint {file} is damaged: its content is not what was written (SHA-256 {digest[:16]}..., expected "
            f"{known[0]['sha256'][:16]}...). If it was changed on purpose, remove {manifest_of(file).name}.{_others(file)}"
        )


def _others(damaged: Path) -> str:
    """The newest intact neighbour, to go on with."""
    candidates = [p for p in damaged.parent.glob("*.ckpt") if p.is_file() and p != damaged and _read_manifest(p)]
    for path in sorted(candidates, key=lambda p: p.stat().st_mtime, reverse=True):
        if any(
            entry["bytes"] == path.stat().st_size and entry["sha256"] == digest_of(path)
            for entry in _read_manifest(path)
        ):
            return f" The newest intact checkpoint beside it: {path}"
    return " There is no other intact checkpoint beside it."


def digest_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _read_manifest(path: Path) -> list[dict[str, Any]]:
    try:
        entries = json.loads(manifest_of(path).read_text())["contents"]
        return [entry for entry in entries if isinstance(entry["bytes"], int) and isinstance(entry["sha256"], str)]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _write_manifest(path: Path, entries: list[dict[str, Any]]) -> None:
    manifest = manifest_of(path)
    part = manifest.with_name(f"{manifest.name}.part")
    with open(part, "w") as file:
        json.dump({"file": path.name, "contents": entries}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, manifest)


def _sync_directory(path: Path) -> None:
    with suppress(OSError):  # some file systems cannot
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
