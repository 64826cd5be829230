"""Plain values from one stage to all others: what the first stage says of the batch, what the last one says of the result."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from pipepart.runtime.mesh import Groups
from pipepart.runtime.transport import Transport

__all__ = ["share"]

_FIXED = 2048  # bytes: one message carries any ordinary value


def share(value: Any, groups: Groups, transport: Transport, source_stage: int, device: torch.device) -> Any:
    """Give `value` of stage `source_stage` to all stages of the replica, between the messages of two steps."""
    if groups.stage == source_stage:
        data = pickle.dumps(value)
        first = _padded(len(data).to_bytes(8, "little") + data[: _FIXED - 8]).to(device)
        rest = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device) if len(data) > _FIXED - 8 else None
        pending = []
        for stage in range(groups.mesh.stages):
            if stage != source_stage:
                pending += [transport.send(part, stage) for part in (first, rest) if part is not None]
        for transfer in pending:
            transfer.wait()
        return value
    raw = _receive(_FIXED, transport, source_stage, device)
    length = int.from_bytes(raw[:8], "little")
    data = raw[8 : 8 + length] if length <= _FIXED - 8 else _receive(length, transport, source_stage, device)
    return pickle.loads(data)


def _padded(head: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(head.ljust(_FIXED, b"\0")), dtype=torch.uint8)


def _receive(size: int, transport: Transport, source: int, device: torch.device) -> bytes:
    buffer = torch.empty(size, dtype=torch.uint8, device=device)
    transport.recv(buffer, source).wait()
    return bytes(buffer.cpu().numpy().tobytes())
