"""The step header: what the first stage tells the others before a step, in one small collective."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist

from pipepart.runtime.mesh import Groups

__all__ = ["share"]

_FIXED = 2048  # bytes: one broadcast carries any ordinary header


def share(value: Any, groups: Groups, source_stage: int, device: torch.device) -> Any:
    """Give `value` of stage `source_stage` to all stages of the replica. Costs one broadcast if it is small."""
    if groups.mesh.stages == 1:
        return value
    source = groups.rank_of_stage(source_stage)
    here = groups.stage == source_stage
    buffer = torch.zeros(_FIXED, dtype=torch.uint8)
    data = b""
    if here:
        data = pickle.dumps(value)
        head = len(data).to_bytes(8, "little") + data[: _FIXED - 8]
        buffer[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    buffer = buffer.to(device)
    dist.broadcast(buffer, source, group=groups.pipeline)
    raw = buffer.cpu().numpy().tobytes()
    length = int.from_bytes(raw[:8], "little")
    if length > _FIXED - 8:
        rest = torch.empty(length, dtype=torch.uint8)
        if here:
            rest = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rest = rest.to(device)
        dist.broadcast(rest, source, group=groups.pipeline)
        raw = b"\0" * 8 + rest.cpu().numpy().tobytes()
    return value if here else pickle.loads(raw[8 : 8 + length])
