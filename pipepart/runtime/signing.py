"""Objects between ranks, signed with the key of the job: bytes that another process has written are never unpickled."""

from __future__ import annotations

import hmac
import io
import pickle
from typing import Any

import torch

from pipepart.errors import PipelineError
from pipepart.runtime.mesh import Groups

__all__ = ["signed", "verified"]

_SIGNATURE = 32  # bytes


class _HostPickler(pickle.Pickler):
    """Pickles tensors of accelerators as tensors in host memory: another rank must not rebuild them on this device."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
            return _itself, (value.detach().cpu(),)
        return NotImplemented


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def signed(value: Any, groups: Groups) -> bytes:
    """Return the pickle of an object behind its signature."""
    buffer = io.BytesIO()
    _HostPickler(buffer).dump(value)
    data = buffer.getvalue()
    return hmac.digest(groups.key, data, "sha256") + data


def verified(data: bytes, groups: Groups) -> Any:
    """Return the object that a rank of this job has signed; raise an error for all other bytes."""
    content = memoryview(data)[_SIGNATURE:]
    if not hmac.compare_digest(data[:_SIGNATURE], hmac.digest(groups.key, content, "sha256")):
        raise PipelineError(
            f"{groups.where} has received an object that no rank of this job has signed, and has not read it. Another process "
            "may have connected to this job, or PIPEPART_TOKEN differs between its hosts: set it to one value on all hosts."
        )
    return pickle.loads(content)
