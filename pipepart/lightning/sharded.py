"""Checkpoints as directories: each stage writes its own part with torch.distributed.checkpoint, and any shape reads them.

```
NAME.ckpt/                renamed to this name after everything is written
    __0_0.distcp ...      tensors: model.<name>, optimizer.<number>.<parameter>.<key>
    .metadata             torch's index of the tensors
    rest.pt               everything except tensors of the model and the optimizer: loops, callbacks, groups, hyper-parameters
    manifest.json         size and digest of each file
```
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors
from torch.distributed.checkpoint.state_dict_saver import save as write_tensors
from torch.optim import Optimizer

from pipepart.lightning import remote_shards
from pipepart.lightning.checkpoint_files import (
    CheckpointError,
    Content,
    SafeCheckpointIO,
    check,
    known_contents,
    load_file,
    manifest_of,
    others_beside,
    reason_of,
    write_manifest,
)
from pipepart.lightning.optimizers import gather_states, own_part
from pipepart.lightning.remote_files import is_remote
from pipepart.lightning.shard_contents import REST, rest_of, tensors_of
from pipepart.lightning.shard_index import ShardReader
from pipepart.runtime import Groups, StageRuntime

__all__ = [
    "bring_back",
    "consolidate",
    "is_sharded",
    "load_model",
    "load_optimizer",
    "load_rest",
    "load_whole_model",
    "save",
    "verify_shards",
]

_VISIBLE = 5.0  # seconds after which all hosts see what one has written to a shared disk


def is_sharded(path: Any) -> bool:
    if is_remote(path):
        return remote_shards.is_sharded(path)
    return Path(path).is_dir() and (Path(path) / REST).exists()


# ---- writing: on every rank


def save(
    checkpoint: dict[str, Any],
    path: Any,
    runtime: StageRuntime,
    together: Callable[[Callable[[], None]], None],
    patient: Groups | None = None,
) -> None:
    """Write a `checkpoint` that holds this rank's parts of the model and the optimizers. All ranks must call it.

    Replica 0 writes the model, and every rank the states of the parameters that it updates. `patient`: the groups in which
    ranks wait for each other. Each step runs in `together`: if it fails on one rank, it fails on all, and the previous
    checkpoint is untouched.
    """
    if is_remote(path):
        remote_shards.save(checkpoint, path, runtime, together, patient)
        return
    target, groups = Path(path), runtime.groups
    part = target.with_name(f"{target.name}.part")
    divided, writes_model = runtime.parameters.divides_updates, groups is None or groups.replica == 0
    tensors, plain = tensors_of(checkpoint, writes_model)
    every_plain = gather_states(plain, runtime)
    first = groups is None or groups.rank == 0

    def begin() -> None:
        if first:
            bring_back(target)
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)

    def write() -> None:
        if groups is None:
            write_tensors(tensors, checkpoint_id=part, no_dist=True)
        elif divided or writes_model:
            assert patient is not None
            write_tensors(tensors, checkpoint_id=part, process_group=patient.world if divided else patient.pipeline)

    def finish() -> None:
        if not first:
            return
        _check_files(part)
        with open(part / REST, "wb") as file:
            torch.save(rest_of(checkpoint, every_plain), file)
            file.flush()
            os.fsync(file.fileno())
        write_manifest(part, {file.name: [Content.of(file)] for file in sorted(part.iterdir())})
        _take_the_place_of(part, target)

    try:
        for step in (begin, write, finish):
            together(lambda step=step: _named(step, target))  # type: ignore[misc]
    except CheckpointError:
        shutil.rmtree(part, ignore_errors=True)  # on every rank: its host may have a disk of its own
        raise


def _check_files(part: Path) -> None:
    """Refuse a checkpoint of which this rank does not see all files: another host has written them to a disk of its own."""
    deadline = time.monotonic() + _VISIBLE
    for name in sorted({entry.relative_path for entry in ShardReader(part).read_metadata().storage_data.values()}):
        while not (part / name).is_file():
            os.listdir(part)  # a network disk looks again
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"rank 0 on {socket.gethostname()} does not see {part / name}, which a rank of another host has written. "
                    "Each stage writes its own part of a sharded checkpoint: use a folder on a disk that all hosts share, or "
                    "sharded=False, with which rank 0 writes one file"
                )
            time.sleep(0.1)


def _named(step: Callable[[], None], target: Path) -> None:
    """Name the checkpoint in errors of `step`, and the previous one if there is one."""
    try:
        step()
    except (OSError, RuntimeError, CheckpointException) as error:
        first = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        kept = f" The previous checkpoint is untouched: {target}." if target.exists() else ""
        raise CheckpointError(f"the checkpoint {target} could not be written: {reason_of(first)}.{kept}") from error


def _take_the_place_of(part: Path, target: Path) -> None:
    """Exchange the names of both in one step where the system supports that (Linux).

    Elsewhere the old one is renamed first: after a crash between the two steps, `bring_back` finds it.
    """
    aside = _aside(target)
    shutil.rmtree(aside, ignore_errors=True)
    if not target.exists():
        os.replace(part, target)
    elif _exchange(part, target):
        shutil.rmtree(part, ignore_errors=True)
    else:
        os.replace(target, aside)
        os.replace(part, target)
        shutil.rmtree(aside, ignore_errors=True)


def _aside(target: Path) -> Path:
    return target.with_name(f"{target.name}.old")


def _exchange(one: Path, other: Path) -> bool:
    try:
        swap = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    here, both = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(swap(here, os.fsencode(one), here, os.fsencode(other), both) == 0)


def bring_back(path: Any) -> None:
    """Rename a checkpoint back that a crash in the middle of a save has left under its temporary name."""
    target = Path(path)
    if not is_remote(path) and not target.exists() and is_sharded(_aside(target)):
        os.replace(_aside(target), target)


# ---- reading: each rank for itself


def verify_shards(path: Any) -> None:
    """Compare a directory with its manifest."""
    if is_remote(path):
        remote_shards.verify(path)
        return
    folder = Path(path)
    try:
        known = known_contents(folder)
    except CheckpointError as error:
        raise CheckpointError(
            f"the checkpoint {folder} is damaged: no readable {manifest_of(folder).name} ({error}).{others_beside(folder)}"
        ) from error
    check(folder, known)


def load_rest(path: Any, weights_only: bool | None) -> dict[str, Any]:
    """The checkpoint without its tensors, with the path of the directory under "pipepart_shards".

    What it holds is in host memory, whatever device rank 0 had: each owner moves its part to its own device.
    `weights_only`: None or True read plain values only; False also reads objects of other classes, which can run code.
    """
    if is_remote(path):
        checkpoint, place = remote_shards.load_rest(path, weights_only)
    else:
        checkpoint, place = load_file(Path(path) / REST, weights_only, "cpu"), str(path)
    if not isinstance(checkpoint, dict):
        raise CheckpointError(f"the checkpoint {path} cannot be read: {REST} holds a {type(checkpoint).__name__}")
    checkpoint["pipepart_shards"] = place
    return checkpoint


def load_model(checkpoint: dict[str, Any], runtime: StageRuntime, strict: bool) -> None:
    """Read the parameters and buffers of this stage."""
    reader = ShardReader(checkpoint["pipepart_shards"])
    known = reader.read_metadata().state_dict_metadata
    state = runtime.parts.state_dict()
    wanted = {
        name: torch.empty_like(value) for name, value in state.items() if not value.is_meta and f"model.{name}" in known
    }
    loaded = {f"model.{name}": value for name, value in wanted.items()}
    _read(loaded, reader)
    absent = {name: torch.empty(0) for name, value in state.items() if value.is_meta and f"model.{name}" in known}
    saved = {name.removeprefix("model.") for name in known if name.startswith("model.")}
    extra = {name: torch.empty(0) for name in saved - set(state)}
    runtime.load_full_state_dict({**wanted, **absent, **extra}, strict)


def load_optimizer(
    checkpoint: dict[str, Any], number: int, optimizer: Optimizer, runtime: StageRuntime | None = None
) -> None:
    """Read the states of the parameters that this rank updates."""
    if "state" not in checkpoint["optimizer_states"][number]:
        optimizer.load_state_dict(checkpoint["optimizer_states"][number])
        return
    reader = ShardReader(checkpoint["pipepart_shards"])
    known = reader.read_metadata().state_dict_metadata
    found: dict[int, dict[str, str]] = {}
    for name in known:
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            which, index, key = rest.split(".", 2)
            if int(which) == number:
                found.setdefault(int(index), {})[key] = name
    own = own_part(optimizer, found, runtime)
    buffers = {name: _empty(known[name]) for keys in own.values() for name in keys.values()}
    _read(buffers, reader)
    state: dict[int, dict[str, Any]] = {
        i: {key: buffers[name] for key, name in keys.items()} for i, keys in own.items()
    }
    for (which, index, key), value in checkpoint["pipepart_plain_state"].items():
        if which == number and index in state:
            state[index][key] = value
    optimizer.load_state_dict({**checkpoint["optimizer_states"][number], "state": state})


def load_whole_model(folder: Any, weights_only: bool | None = None) -> dict[str, Any]:
    """The checkpoint of a directory with all parameters and buffers of the model, without the states of its optimizers."""
    checkpoint = load_rest(folder, weights_only)
    reader = ShardReader(checkpoint.pop("pipepart_shards"))
    known = reader.read_metadata().state_dict_metadata
    tensors = {name: _empty(entry) for name, entry in known.items() if name.startswith("model.")}
    _read(tensors, reader)
    left_out = ("optimizer_states", "pipepart_plain_state", "state_dict")
    rest = {key: value for key, value in checkpoint.items() if key not in left_out}
    return {**rest, "state_dict": {name.removeprefix("model."): value for name, value in tensors.items()}}


def _read(tensors: dict[str, torch.Tensor], reader: ShardReader) -> None:
    """Read values into tensors, each rank its own; torch would warn that ranks do not read together."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        read_tensors(tensors, storage_reader=reader, no_dist=True)


def _empty(metadata: Any) -> torch.Tensor:
    assert isinstance(metadata, TensorStorageMetadata)  # `ShardReader` reads no others
    return torch.empty(metadata.size, dtype=metadata.properties.dtype)


def consolidate(folder: Any, file: Any, weights_only: bool | None = None) -> None:
    """Convert a directory to one plain `.ckpt` file that Lightning loads without pipepart.

    Checkpoints with objects of your own classes (in hyper-parameters or in the state of callbacks) need
    ``weights_only=False``, which can run code: use it for checkpoints from a source that you trust.
    """
    verify_shards(folder)
    checkpoint = load_rest(folder, weights_only)
    reader = ShardReader(checkpoint.pop("pipepart_shards"))
    tensors = {name: _empty(entry) for name, entry in reader.read_metadata().state_dict_metadata.items()}
    _read(tensors, reader)
    plain = checkpoint.pop("pipepart_plain_state")
    for name, value in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "model":
            checkpoint["state_dict"][rest] = value
        else:
            number, index, key = rest.split(".", 2)
            checkpoint["optimizer_states"][int(number)]["state"].setdefault(int(index), {})[key] = value
    for (number, index, key), value in plain.items():
        checkpoint["optimizer_states"][number]["state"].setdefault(index, {})[key] = value
    SafeCheckpointIO().save_checkpoint(checkpoint, file)
