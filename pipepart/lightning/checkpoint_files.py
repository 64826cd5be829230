"""Files of a checkpoint: written under a temporary name and renamed, and compared with their digests before they are read.

A crash cannot leave a broken file. A file holds its digest itself (`sealed_file`); that of the files of a directory is in its
`manifest.json`. Earlier versions wrote a manifest beside a file, `NAME.ckpt.sha256`, which is still read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipepart.errors import PipepartError
from pipepart.files import Field, load_json, write_whole
from pipepart.lightning.namespaces import either, loaded
from pipepart.lightning.remote_files import MANIFEST, RemoteFile, is_remote, received, sent_from
from pipepart.lightning.sealed_file import fault_of_seal, seal

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO
else:
    CheckpointIO = object

__all__ = [
    "CheckpointError",
    "Content",
    "SafeCheckpointIO",
    "check",
    "known_contents",
    "load_file",
    "manifest_of",
    "others_beside",
    "reason_of",
    "safe_by_default",
    "verify",
    "write_manifest",
]


class CheckpointError(PipepartError):
    """A checkpoint could not be written, or the files on disk differ from those that were written."""


@dataclass(frozen=True)
class Content:
    """The size and the digest of the content of a file."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Content:
        return cls(path.stat().st_size, _digest_of(path))


def manifest_of(checkpoint: Path) -> Path:
    """The path of the manifest of a directory, or of a file of an earlier version."""
    return checkpoint / MANIFEST if checkpoint.is_dir() else checkpoint.with_name(f"{checkpoint.name}.sha256")


def write_manifest(checkpoint: Path, files: Mapping[str, Sequence[Content]]) -> None:
    """Write the contents that each file may have: two of them while one file replaces another."""
    document = {"files": {name: [asdict(one) for one in contents] for name, contents in files.items()}}
    write_whole(manifest_of(checkpoint), json.dumps(document), sync=True)


def known_contents(checkpoint: Path) -> dict[Path, tuple[Content, ...]]:
    """The files of a checkpoint and the contents that they may have. CheckpointError: no readable manifest."""
    manifest = load_json(manifest_of(checkpoint), CheckpointError)
    known = _files_of(manifest)
    for name, contents in known.items():
        if not contents or name != Path(name).name:
            raise CheckpointError(
                f"{manifest.path}: the entry {name!r} is not valid; expected the name of a file beside it, with size and digest"
            )
    if checkpoint.is_dir():
        return {checkpoint / name: contents for name, contents in known.items()}
    if len(known) != 1:
        raise CheckpointError(f"{manifest.path} lists {len(known)} files; expected one")
    return {checkpoint: next(iter(known.values()))}  # under any name: the file may have been renamed


def _files_of(manifest: Field) -> Mapping[str, tuple[Content, ...]]:
    """The files of a manifest. Earlier versions wrote two other forms, for files and for directories."""
    entries = manifest.entries()
    if isinstance(entries.get("files"), dict):
        return manifest.at("files").read(Mapping[str, tuple[Content, ...]])  # type: ignore[type-abstract]
    if "contents" in entries:
        return {manifest.at("file").read(str): manifest.at("contents").read(tuple[Content, ...])}
    return {name: (manifest.at(name).read(Content),) for name in entries}


def check(checkpoint: Path, known: Mapping[Path, Sequence[Content]], hint: str = "") -> None:
    """Compare the files of a checkpoint with their known contents."""
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
            return f"{of_it} differs from the saved one (SHA-256 {digest[:16]}..., expected {expected[:16]}...)"
    return ""


def others_beside(damaged: Path | RemoteFile) -> str:
    """A sentence on the newest intact checkpoint in the same folder, to continue with."""
    candidates: list[Any]
    if isinstance(damaged, RemoteFile):
        with suppress(Exception):  # an error of an object store does not hide the damage
            beside = [file for file in damaged.parent.children() if file.name.endswith(".ckpt")]
            candidates = sorted((file for file in beside if file != damaged), key=RemoteFile.changed, reverse=True)
            for file in candidates:
                if _is_intact_there(file):
                    return f" The newest intact checkpoint beside it: {file}"
    else:
        candidates = [path for path in damaged.parent.glob("*.ckpt") if path != damaged]
        for path in sorted(candidates, key=lambda p: p.stat().st_mtime, reverse=True):
            try:
                if _is_intact(path):
                    return f" The newest intact checkpoint beside it: {path}"
            except (OSError, CheckpointError):
                continue
    return " There is no other intact checkpoint beside it."


def _is_intact(checkpoint: Path) -> bool:
    """Whether the checkpoint has a digest, and its content is the saved one."""
    fault = None if checkpoint.is_dir() else fault_of_seal(checkpoint)
    if fault is None:
        known = known_contents(checkpoint)
        return all(known.values()) and not _fault(checkpoint, known)
    return not fault


def _is_intact_there(checkpoint: RemoteFile) -> bool:
    from pipepart.lightning.remote_shards import fault_of, is_sharded  # which writes with this module

    if is_sharded(checkpoint):
        return not fault_of(checkpoint)
    with received(checkpoint) as file:
        return fault_of_seal(file) == ""


def _digest_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def reason_of(error: BaseException) -> str:
    """Return the reason of a failed write: that of the system where it is known, and the words of torch."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return str(cause) if cause is error else f"{cause} (torch: {error})"
        cause = cause.__cause__ or cause.__context__
    if "unexpected pos" in str(error):  # torch's archive got fewer bytes into the file than it has handed over
        return f"the disk is full, or the file is larger than allowed (torch: {error})"
    return str(error)


class SafeCheckpointIO(CheckpointIO):
    """Plain `.ckpt` files, each with its digest inside. They are complete whenever the process ends."""

    def __init__(self) -> None:
        self._plain = loaded().TorchCheckpointIO()

    def teardown(self) -> None:
        self._plain.teardown()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if storage_options is not None:
            self._plain.save_checkpoint(checkpoint, path, storage_options)
            return
        if is_remote(path):
            _send(checkpoint, path)
            return
        target = Path(path)
        part = target.with_name(f"{target.name}.part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.is_dir():
                raise CheckpointError(
                    f"cannot write the checkpoint {target}: there is a directory of that name. Choose another name."
                )
            with open(part, "w+b") as file:
                torch.save(checkpoint, file)
                seal(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, target)
            with suppress(OSError):
                manifest_of(target).unlink(missing_ok=True)  # of an earlier version; the digest inside counts
            _sync_directory(target.parent)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
            with suppress(OSError):
                part.unlink()
            kept = f"The previous checkpoint is untouched: {target}." if target.exists() else ""
            raise CheckpointError(
                f"the checkpoint {target} could not be written: {reason_of(error)}. {kept}".rstrip()
            ) from error

    def load_checkpoint(
        self, path: Any, map_location: Callable | None = lambda storage, loc: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Tensors are mapped from the file and read when they are used, so a rank reads only its part of a large file."""
        if is_remote(path):
            return _load_there(path, map_location, weights_only)
        if not Path(path).exists():
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        found: dict[str, Any] = load_file(Path(path), weights_only, map_location)
        return found

    def remove_checkpoint(self, path: Any) -> None:
        if is_remote(path):
            RemoteFile.at(path).remove()
            return
        self._plain.remove_checkpoint(path)
        manifest_of(Path(path)).unlink(missing_ok=True)


def _send(checkpoint: dict[str, Any], address: Any) -> None:
    """Write a sealed file and copy it to its address, where it appears as a whole."""
    target = RemoteFile.at(address)
    try:
        with sent_from(address) as file, open(file, "w+b") as opened:
            torch.save(checkpoint, opened)
            seal(opened)
    except Exception as error:  # those of the libraries of object stores are of many kinds
        raise CheckpointError(
            f"the checkpoint {target} could not be written: {reason_of(error)}. A previous checkpoint there is untouched."
        ) from error


def _load_there(address: Any, map_location: Any, weights_only: bool | None) -> dict[str, Any]:
    """Read a file at an address through a copy, after the copy was compared with its digest."""
    source = RemoteFile.at(address)
    with ExitStack() as kept:
        try:
            if not source.is_file():
                raise FileNotFoundError(f"Checkpoint file not found: {source}")
            copy = kept.enter_context(received(address))
        except FileNotFoundError:
            raise
        except Exception as error:
            raise CheckpointError(f"the checkpoint {source} cannot be read: {reason_of(error)}") from error
        if fault := fault_of_seal(copy):
            raise CheckpointError(f"the checkpoint {source} is damaged: {fault}.{others_beside(source)}")
        found: dict[str, Any] = load_file(copy, weights_only, map_location, source)
        return found


def load_file(path: Path, weights_only: bool | None, map_location: Any = None, source: RemoteFile | None = None) -> Any:
    """Read a file of `torch.save`, its tensors when they are used; `source` is the address of which it is a copy.

    `weights_only`: None or True read tensors and plain values only; False also reads objects of other classes.
    """
    options: dict[str, Any] = {"map_location": map_location, "weights_only": weights_only}
    try:
        try:
            return torch.load(path, mmap=True, **options)
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
            return torch.load(path, **options)  # files of old versions of torch
    except Exception as error:
        name = path if source is None else source
        if "weights_only" in str(error) or "Weights only" in str(error):
            raise CheckpointError(
                f"the checkpoint {name} is refused: it holds more than tensors and plain values, and reading that can run "
                f"code.\n  reason: {_named_in(str(error))}\n  do: if you trust its source, read it with "
                "weights_only=False (an argument of trainer.fit, validate, test, predict from Lightning 2.6 on, and of "
                "pipepart.consolidate), or "
                "allow the class with torch.serialization.add_safe_globals([...])"
            ) from error
        raise CheckpointError(f"the checkpoint {name} cannot be read: {error}{others_beside(name)}") from error


def _named_in(text: str) -> str:
    """The sentence of torch's message that names the class, or its first line."""
    found = re.search(r"(?i)(?:unsupported|global)[^\n]*? ([\w]+(?:\.[\w]+)+)", text)
    return found.group(0) if found else text.splitlines()[0]


def safe_by_default(io: CheckpointIO | None) -> CheckpointIO:
    """The given plugin, with `SafeCheckpointIO` where it leaves the choice open."""
    wrapping, inner = either("_WrappingCheckpointIO"), io
    while isinstance(inner, wrapping):  # one may wrap another
        outer, inner = inner, inner.checkpoint_io
        if inner is None:
            knows: Any = io if hasattr(io, "_base_checkpoint_io_configured") else outer  # hands it on to the last one
            knows.checkpoint_io = SafeCheckpointIO()
    return SafeCheckpointIO() if io is None else io


def verify(path: Any) -> None:
    """Compare a checkpoint file with its digest. Files without one (from elsewhere) pass."""
    file = Path(path)
    if is_remote(path) or not file.is_file():  # that of an address is compared when it is read
        return
    fault = fault_of_seal(file)
    if fault:
        raise CheckpointError(f"the checkpoint {file} is damaged: {fault}.{others_beside(file)}")
    if fault is not None:
        return
    contents = _written_before(file)
    if contents:
        check(file, {file: contents}, f" If it was changed on purpose, remove {manifest_of(file).name}.")


def _written_before(file: Path) -> tuple[Content, ...]:
    """The contents in the manifest of a file; none if it has no readable manifest."""
    try:
        return known_contents(file).get(file, ())
    except CheckpointError:
        return ()


def _sync_directory(path: Path) -> None:
    with suppress(OSError):  # not supported by every file system
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
