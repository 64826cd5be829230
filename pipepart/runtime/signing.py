"""Objects between ranks, signed with the key of the job: bytes that another process has written are never unpickled."""

from __future__ import annotations

import hmac
import pickle
from typing import Any

from pipepart.errors import PipelineError
from pipepart.runtime.mesh import Groups

__all__ = ["signed", "verified"]

_SIGNATURE = 32  # bytes


def signed(value: Any, groups: Groups) -> bytes:
    """Return the pickle of an object behind its signature."""
    data = pickle.dumps(value)
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
