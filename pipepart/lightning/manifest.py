"""Sizes and digests of the files of a checkpoint: written with it, and held against it before it is read.

The manifest of a file is beside it (`NAME.ckpt.sha256`), that of a directory is inside (`manifest.json`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipepart.errors import PipepartError

__all__ = ["CheckpointError", "Content", "check", "known_contents", "manifest_of", "others_beside", "write_manifest"]

_INSIDE = "manifest.json"


class CheckpointError(PipepartError):
    """A checkpoint could not be written, or what is on disk is not what was written."""


@dataclass(frozen=True)
class Content:
    """The size and the digest of what a file holds."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Content:
        return cls(path.stat().st_size, _digest_of(path))


def manifest_of(checkpoint: Path) -> Path:
    return checkpoint / _INSIDE if checkpoint.is_dir() else checkpoint.with_name(f"{checkpoint.name}.sha256")


def write_manifest(checkpoint: Path, files: Mapping[str, Sequence[Content]]) -> None:
    """For each file the contents that it may have: two of them while one takes the place of the other."""
    manifest = manifest_of(checkpoint)
    part = manifest.with_name(f"{manifest.name}.part")
    with open(part, "w") as file:
        json.dump({"files": {name: [asdict(one) for one in contents] for name, contents in files.items()}}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, manifest)


def known_contents(checkpoint: Path) -> dict[Path, list[Content]]:
    """The files of a checkpoint and what they may hold. OSError, ValueError: there is no manifest that can be read."""
    document = json.loads(manifest_of(checkpoint).read_text())
    try:
        files = _files_of(document)
        known = {name: [Content(int(one["bytes"]), str(one["sha256"])) for one in files[name]] for name in files}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is no manifest: {type(error).__name__}: {error}") from error
    if checkpoint.is_dir():
        return {checkpoint / name: contents for name, contents in known.items()}
    (contents,) = known.values() if known else ([],)  # under whatever name: the file may have got another one
    return {checkpoint: contents}


def _files_of(document: Any) -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """The files of a manifest, also of one that was written when files and directories had forms of their own."""
    if isinstance(document.get("files"), dict):
        files: Mapping[str, Sequence[Mapping[str, Any]]] = document["files"]
        return files
    if "contents" in document:
        return {document["file"]: document["contents"]}
    return {name: [content] for name, content in document.items()}


def check(checkpoint: Path, known: Mapping[Path, Sequence[Content]], hint: str = "") -> None:
    """Hold a checkpoint against what is known of its files."""
    fault = _fault(checkpoint, known)
    if fault:
        raise CheckpointError(f"the checkpoint {checkpoint} is damaged: {fault}.{hint}{others_beside(checkpoint)}")


def _fault(checkpoint: Path, known: Mapping[Path, Sequence[Content]]) -> str:
    for file, contents in known.items():
        name, of_it = ("it", "its content") if file == checkpoint else (file.name, f"the content of {file.name}")
        if not file.exists():
            return f"{name} is missing"
        size = file.stat().st_size
        if all(content.bytes != size for content in contents):
            written = contents[0].bytes
            return f"{name} has {size:,} bytes, and {written:,} were written (cut off, or changed by something else)"
        digest = _digest_of(file)
        if all(content.sha256 != digest for content in contents):
            expected = contents[0].sha256
            return f"{of_it} is not what was written (SHA-256 {digest[:16]}..., expected {expected[:16]}...)"
    return ""


def others_beside(damaged: Path) -> str:
    """The newest intact neighbour, to go on with."""
    candidates = [path for path in damaged.parent.glob("*.ckpt") if path != damaged]
    for path in sorted(candidates, key=lambda p: p.stat().st_mtime, reverse=True):
        try:
            known = known_contents(path)
            if all(known.values()) and not _fault(path, known):
                return f" The newest intact checkpoint beside it: {path}"
        except (OSError, ValueError):
            continue
    return " There is no other intact checkpoint beside it."


def _digest_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
