"""Sharded checkpoints at addresses of object stores, where no folder can be renamed.

```
NAME.ckpt/
    manifest.json         the folder of the checkpoint that counts, with size and digest of each of its files
    a1b2c3d4/             one save: the files of a sharded checkpoint (see `sharded`)
```

A save writes into a folder of its own, and replaces the small manifest last, in one step. Until then the previous checkpoint
counts. What interrupted saves have left is removed by the next one.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as write_tensors

from pipepart.files import parse_json
from pipepart.lightning.checkpoint_files import CheckpointError, Content, load_file, others_beside, reason_of
from pipepart.lightning.optimizers import gather_states
from pipepart.lightning.remote_files import MANIFEST, RemoteFile, received, sent_from
from pipepart.lightning.shard_contents import REST, rest_of, tensors_of
from pipepart.runtime import Groups, StageRuntime
from pipepart.runtime.failure import guarded
from pipepart.runtime.meeting import broadcast_object

__all__ = ["is_sharded", "load_rest", "save", "verify"]

_BLOCK = 1 << 22


class _Counted:
    """A stream of bytes that is written, with its size and digest."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._digest, self._size = stream, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        self._stream.write(data)
        self._digest.update(data)
        size = memoryview(data).nbytes
        self._size += size
        return size

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """The store takes blocks as they become full."""

    def close(self) -> None:
        self._stream.close()

    @property
    def content(self) -> Content:
        return Content(self._size, self._digest.hexdigest())


class _Files(FileSystem):
    """Torch's files on fsspec, with the contents that this process has written."""

    def __init__(self) -> None:
        super().__init__()
        self.contents: dict[str, Content] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            if "w" not in mode:
                yield stream
                return
            counted = _Counted(stream)
            yield counted
            self.contents[_name(path)] = counted.content

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.contents[_name(new_path)] = self.contents.pop(_name(path))


def _name(path: Any) -> str:
    return str(path).rpartition("/")[2]


def is_sharded(path: Any) -> bool:
    return (RemoteFile.at(path) / MANIFEST).is_file()


def save(
    checkpoint: dict[str, Any],
    path: Any,
    runtime: StageRuntime,
    together: Callable[[Callable[[], None]], None],
    patient: Groups | None = None,
) -> None:
    """Write a `checkpoint` that holds this rank's parts, as `sharded.save` does. All ranks must call it."""
    target, groups = RemoteFile.at(path), runtime.groups
    first = groups is None or groups.rank == 0
    name = secrets.token_hex(8)
    if groups is not None:
        with guarded(groups):
            name = broadcast_object(name, 0, groups)
    folder, files = target / name, _Files()
    divided, writes_model = runtime.parameters.divides_updates, groups is None or groups.replica == 0
    tensors, plain = tensors_of(checkpoint, writes_model)
    every_plain = gather_states(plain, runtime)
    contents: dict[str, Content] | None = None

    def write() -> None:
        if not divided and not writes_model:
            return
        writer: Any = FsspecWriter(str(folder), sync_files=False)
        writer.fs = files
        writer.path = files.init_path(str(folder))
        group = None if patient is None else patient.world if divided else patient.pipeline
        write_tensors(tensors, storage_writer=writer, process_group=group, no_dist=groups is None)

    def finish() -> None:
        if not first:
            return
        assert contents is not None
        with sent_from(folder / REST) as file:
            torch.save(rest_of(checkpoint, every_plain), file)
            contents[REST] = Content.of(file)
        document = {"folder": name, "files": {key: asdict(value) for key, value in sorted(contents.items())}}
        (target / MANIFEST).write(json.dumps(document).encode())
        with suppress(Exception):  # the checkpoint is complete
            _remove_others(target, name)

    try:
        together(lambda: _named(write, target))
        contents = gather_states(files.contents, runtime)
        together(lambda: _named(finish, target))
    except CheckpointError:
        if first:
            with suppress(Exception):  # if it is not known what counts, the folder stays for the next save
                _remove_unless_it_counts(target, name)
        raise


def _named(step: Callable[[], None], target: RemoteFile) -> None:
    try:
        step()
    except (Exception, CheckpointException) as error:  # those of the libraries of object stores are of many kinds
        first = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        raise CheckpointError(
            f"the checkpoint {target} could not be written: {reason_of(first)}. A previous checkpoint there is untouched."
        ) from error


def _remove_unless_it_counts(target: RemoteFile, name: str) -> None:
    """Remove the folder of a save that has failed. A store may have taken the manifest and not have said so."""
    try:
        counts = json.loads((target / MANIFEST).read())["folder"] == name
    except FileNotFoundError:
        counts = False
    if not counts:
        (target / name).remove()


def _remove_others(target: RemoteFile, name: str) -> None:
    for other in target.children():
        if other.name not in (name, MANIFEST):
            other.remove()


def _manifest(path: Any) -> tuple[RemoteFile, Mapping[str, Content]]:
    """The folder of the checkpoint that counts, and the contents of its files."""
    target = RemoteFile.at(path)
    try:
        text = (target / MANIFEST).read().decode()
        manifest = parse_json(text, f"{target}/{MANIFEST}", CheckpointError)
        name = manifest.at("folder").read(str)
        files = manifest.at("files").read(Mapping[str, Content])  # type: ignore[type-abstract]
        for entry in (name, *files):
            if entry != Path(entry).name:
                raise CheckpointError(f"{manifest.path}: the entry {entry!r} is not valid; expected the name of a file")
    except Exception as error:
        raise CheckpointError(
            f"the checkpoint {target} is damaged: no readable {MANIFEST} ({error}).{others_beside(target)}"
        ) from error
    return target / name, files


def verify(path: Any) -> None:
    """Compare the files of a checkpoint with their sizes and digests, which reads all of them."""
    fault = fault_of(path)
    if fault:
        raise CheckpointError(f"the checkpoint {path} is damaged: {fault}.{others_beside(RemoteFile.at(path))}")


def fault_of(path: Any) -> str:
    """A sentence on the damage of a checkpoint, "" if it is intact."""
    folder, files = _manifest(path)
    for name, content in files.items():
        file = folder / name
        if not file.exists():
            return f"{name} is missing"
        digest, size = hashlib.sha256(), 0
        with file.fs.open(file.path, "rb") as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
                size += len(block)
        if size != content.bytes:
            return (
                f"{name} has {size:,} bytes, and {content.bytes:,} were written (cut off, or changed by something else)"
            )
        if digest.hexdigest() != content.sha256:
            return (
                f"the content of {name} differs from the saved one (SHA-256 {digest.hexdigest()[:16]}..., "
                f"expected {content.sha256[:16]}...)"
            )
    return ""


def load_rest(path: Any, weights_only: bool | None) -> tuple[Any, str]:
    """The checkpoint without its tensors, and the address of the folder that has them."""
    folder, _ = _manifest(path)
    with received(folder / REST) as file:
        return load_file(file, weights_only, "cpu"), str(folder)
