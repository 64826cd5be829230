"""A folder of safetensors files from a module in parts: each stage writes its own tensors, and no rank gathers them.

The folder has the form that model libraries read: `model-00001-of-00003.safetensors`, ..., `model.safetensors.index.json`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from pipepart.errors import ConfigError
from pipepart.files import write_whole
from pipepart.lightning.checkpoint_files import CheckpointError, reason_of
from pipepart.lightning.safetensors_weights import INDEX

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["save_weights"]

Part = dict[str, torch.Tensor]


def save_weights(
    trainer: Trainer,
    folder: str | Path,
    convert: Callable[[Part], Mapping[str, torch.Tensor]] | None = None,
    *,
    extras: Callable[[Path], Any] | None = None,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Write the weights of the module that the trainer trains, during a run or after it. All ranks must call it together.

    ``convert(part)`` gets the entries of the state dict whose home is the stage of this rank and returns what is written,
    under the names of the files (default: the part as it is). ``extras(folder)`` is called on rank 0 and writes further files.
    A file has at most `shard_bytes` bytes, if its tensors allow that. The folder appears as a whole: an earlier folder of
    the same name is replaced after everything is written. On several hosts, the folder must be on a disk that they share.
    """
    from pipepart.lightning.pipeline_strategy import PipelineStrategy

    strategy = trainer.strategy
    if not isinstance(strategy, PipelineStrategy):
        raise ConfigError(
            f"save_weights needs a trainer with PipelineStrategy; this one has {type(strategy).__name__}."
        )
    # Steps that run as they are written need no plan: this process holds the whole module.
    runtime = strategy._whole.runtime if strategy._written.steps else strategy.runtime
    groups, target = None if runtime is None else runtime.groups, Path(folder)
    part = target.with_name(f"{target.name}.part")
    first, writes = groups is None or groups.rank == 0, groups is None or groups.replica == 0
    files: list[Part] = []
    names: list[str] = []

    def begin() -> None:
        if first:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        if writes:
            own = trainer.lightning_module.state_dict() if runtime is None else runtime.parts.own_state_dict()
            files.extend(_divided(dict(own if convert is None else convert(own)), shard_bytes))

    def write() -> None:
        for name, tensors in zip(names, files):
            save_file(tensors, part / name, metadata={"format": "pt"})
            with open(part / name, "rb") as file:
                os.fsync(file.fileno())

    def finish() -> None:
        if not first:
            return
        _write_index(part, [entry for entries in contents for entry in entries])
        if extras is not None:
            extras(part)
        _replace(part, target)

    together = strategy._checkpoints.together
    try:
        together(lambda: _named(begin, target))
        counts = strategy._ranks.gather(len(files))
        before, total = sum(counts[: 0 if groups is None else groups.rank]), sum(counts)
        names = [_file_name(before + number, total) for number in range(len(files))]
        together(lambda: _named(write, target))
        contents = strategy._ranks.gather(
            [(name, key, value.nbytes) for name, tensors in zip(names, files) for key, value in tensors.items()]
        )
        together(lambda: _named(finish, target))
    except CheckpointError:
        if first:
            shutil.rmtree(part, ignore_errors=True)
        raise


def _divided(tensors: Part, most: int) -> list[Part]:
    """Groups of tensors of at most `most` bytes, in their order. A larger tensor is a group of its own."""
    found: list[Part] = []
    size = 0
    for name, value in tensors.items():
        if not found or size + value.nbytes > most:
            found.append({})
            size = 0
        found[-1][name] = value.detach().contiguous()
        size += value.nbytes
    return found


def _file_name(number: int, total: int) -> str:
    return "model.safetensors" if total == 1 else f"model-{number + 1:05d}-of-{total:05d}.safetensors"


def _write_index(part: Path, contents: list[tuple[str, str, int]]) -> None:
    """Write the index of the files, and check that this rank sees all of them."""
    places: dict[str, str] = {}
    for file, name, _ in contents:
        if name in places:
            raise CheckpointError(f"the tensor {name!r} is written by two stages ({places[name]} and {file})")
        places[name] = file
    for file in sorted(set(places.values())):
        if not (part / file).is_file():
            raise CheckpointError(f"rank 0 does not see {part / file}: use a folder on a disk that all hosts share")
    if len(set(places.values())) > 1:
        document = {"metadata": {"total_size": sum(size for _, _, size in contents)}, "weight_map": places}
        write_whole(part / INDEX, json.dumps(document, indent=2, sort_keys=True) + "\n", sync=True)


def _replace(part: Path, target: Path) -> None:
    aside = target.with_name(f"{target.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    if target.exists():
        os.replace(target, aside)
    os.replace(part, target)
    shutil.rmtree(aside, ignore_errors=True)


def _named(step: Callable[[], None], target: Path) -> None:
    """Name the folder in errors of `step`."""
    try:
        step()
    except CheckpointError as error:
        raise CheckpointError(f"the weights {target} could not be written: {error}.") from error
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"the weights {target} could not be written: {reason_of(error)}.") from error
