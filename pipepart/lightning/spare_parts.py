"""Parts of the state of a run, and what ranks do with them: make their own, send it to the next host, put all together again.

```
    host 0: parts of host 0, host 2      ranks write their parts (stage, optimizer states, loops) into the folder of their host
    host 1: parts of host 1, host 0      and send them to the next host. If one host is lost, the others have all parts, and go
    host 2: parts of host 2, host 1      on at their own shape as from a plain checkpoint.
```
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipepart.lightning.announce import tell
from pipepart.lightning.checkpoint_files import CheckpointError
from pipepart.runtime import Groups
from pipepart.runtime.failure import guarded
from pipepart.runtime.meeting import gather_objects
from pipepart.spare_files import parts_of, step_of

__all__ = ["load_spare", "neighbour", "own_checkpoint", "part_of", "send_to_neighbours", "write_part", "written_part"]


def send_to_neighbours(data: bytes, sizes: Sequence[int], hosts: Sequence[int], groups: Groups) -> dict[int, bytes]:
    """Send the part of this rank to the next host; returns the parts that this rank has received, by the rank of each.

    `sizes` are the bytes of the part of each rank, 0 for none, and `hosts` the number of its host.
    """
    works, buffers = [], dict[int, torch.Tensor]()
    sent = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else None
    for writer, size in enumerate(sizes):
        target = neighbour(writer, hosts)
        if target is None or not size:
            continue
        if groups.rank == writer:
            assert sent is not None
            works.append(dist.isend(sent, target, group=groups.world, tag=writer))
        elif groups.rank == target:
            buffers[writer] = torch.empty(size, dtype=torch.uint8)
            works.append(dist.irecv(buffers[writer], writer, group=groups.world, tag=writer))
    for work in works:
        assert work is not None
        work.wait()
    return {writer: buffer.numpy().tobytes() for writer, buffer in buffers.items()}


def neighbour(rank: int, hosts: Sequence[int]) -> int | None:
    """The rank that keeps the part of a rank: one of the next host, with the same place in it; None with one host."""
    numbers = sorted(set(hosts))
    if len(numbers) == 1:
        return None
    own = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    after = numbers[(numbers.index(hosts[rank]) + 1) % len(numbers)]
    there = [other for other, host in enumerate(hosts) if host == after]
    return there[own.index(rank) % len(there)]


def own_checkpoint(trainer: Any) -> dict[str, Any]:
    """The checkpoint of Lightning with this rank's part of the model and of the optimizers."""
    strategy: Any = trainer.strategy
    sharded = strategy.sharded
    strategy.sharded = sharded or strategy._whole.runtime is not None
    try:
        found: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(False)
        return found
    finally:
        strategy.sharded = sharded


def part_of(checkpoint: dict[str, Any], first: bool, writes_model: bool) -> dict[str, Any]:
    """What one rank writes: its values, and on rank 0 everything else."""
    states = [state.get("state", {}) for state in checkpoint.get("optimizer_states", [])]
    rest = None
    if first:
        rest = {**checkpoint, "state_dict": {}}
        if "optimizer_states" in checkpoint:
            rest["optimizer_states"] = [
                {**state, "state": {}} if "state" in state else state for state in checkpoint["optimizer_states"]
            ]
    return {"model": checkpoint["state_dict"] if writes_model else {}, "states": states, "rest": rest}


def written_part(part: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(part, buffer)
    return buffer.getvalue()


def write_part(path: Path, data: bytes) -> None:
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_bytes(data)
    os.replace(unfinished, path)


def load_spare(path: Any, groups: Groups | None, weights_only: bool | None = None) -> dict[str, Any]:
    """The state as a plain checkpoint, on every rank. Parts that a host does not have are sent by one that has them.

    `path` is the state in the folder of this host. All ranks must call it.
    """
    state = Path(path)
    own = parts_of(state)
    everywhere = [own] if groups is None else gather_objects(own, groups)
    names = sorted(set().union(*everywhere), key=lambda name: int(name.split("-")[1]))
    if not names:
        raise CheckpointError(f"the state {state.name} is in the memory of no host")
    whole: dict[str, Any] | None = None
    model: dict[str, Any] = {}
    states: list[dict[int, Any]] = []
    for name in names:
        data = (state / name).read_bytes() if name in own else b""
        if groups is not None and any(name not in parts for parts in everywhere):
            holder = next(rank for rank, parts in enumerate(everywhere) if name in parts)
            data = _broadcast(data, holder, groups)
            if name not in own and os.environ.get("LOCAL_RANK", "0") == "0":  # until the next state is kept
                state.mkdir(mode=0o700, exist_ok=True)
                write_part(state / name, data)
        part = torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only is not False)
        model.update(part["model"])
        whole = whole or part["rest"]
        for number, found in enumerate(part["states"]):
            states[number:] = states[number:] or [{}]
            states[number].update({index: value for index, value in found.items() if index not in states[number]})
    if whole is None:
        raise CheckpointError(f"the state {state.name} has no part of rank 0")
    whole["state_dict"] = model
    for kept, found in zip(whole.get("optimizer_states", []), states):
        if "state" in kept:
            kept["state"] = dict(sorted(found.items()))
    if groups is None or groups.rank == 0:
        tell(f"pipepart: going on after step {step_of(state.name)}, from the state in the memory of the hosts\n")
    return whole


def _broadcast(data: bytes, source: int, groups: Groups) -> bytes:
    """Send bytes of one rank to all."""
    with guarded(groups):
        size = torch.tensor([len(data)])
        dist.broadcast(size, source, group=groups.world)
        content = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if groups.rank == source
            else torch.empty(int(size), dtype=torch.uint8)
        )
        dist.broadcast(content, source, group=groups.world)
    return content.numpy().tobytes()
