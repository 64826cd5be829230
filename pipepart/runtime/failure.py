"""When one rank fails, every rank says why: the first cause is left in the job's store before connections break."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from pipepart.errors import PipelineError
from pipepart.runtime.mesh import Groups

__all__ = ["first_cause", "guarded"]

_KEY = "pipepart/first-failure"
_PATIENCE = 3.0  # seconds to wait for the rank that caused a broken connection to say why


@contextmanager
def guarded(groups: Groups | None) -> Iterator[None]:
    """Around everything that talks to other ranks: leave the cause where they find it, or find it for this rank."""
    if groups is None:
        yield
        return
    try:
        yield
    except Exception as error:
        if _is_lost_connection(error):
            cause = first_cause(_PATIENCE)
            if cause is not None:
                raise PipelineError(f"{_where(groups)} stopped because another rank failed first.\n{cause}") from error
            raise PipelineError(f"{_where(groups)} lost another rank: {error}") from error
        _leave(f"{_where(groups)} failed:\n{''.join(traceback.format_exception(error)).rstrip()}")
        raise


def _where(groups: Groups) -> str:
    return f"rank {groups.rank} (replica {groups.replica}, stage {groups.stage})"


def _is_lost_connection(error: BaseException) -> bool:
    """Errors of the transport, from gloo, NCCL or the store; all else is a cause of its own."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, (dist.DistError, ConnectionError)):
            return True
        text = str(seen)
        if isinstance(seen, RuntimeError) and any(word in text for word in _TRANSPORT_WORDS):
            return True
        seen = seen.__cause__
    return False


_TRANSPORT_WORDS = ("gloo/", "Connection closed by peer", "Connection reset by peer", "Timed out waiting", "NCCL")


def _leave(text: str) -> None:
    with suppress(Exception):  # the store may be gone with rank 0; then there is nobody left to tell
        store = dist.distributed_c10d._get_default_store()
        if store.add(_KEY + "/count", 1) == 1:
            store.set(_KEY, text)


def first_cause(patience: float = 0.0) -> str | None:
    """What the first failing rank left behind, if it did."""
    deadline = time.monotonic() + patience
    with suppress(Exception):
        store = dist.distributed_c10d._get_default_store()
        while True:
            if store.check([_KEY]):
                return store.get(_KEY).decode(errors="replace")
            if time.monotonic() > deadline:
                return None
            time.sleep(0.05)
    return None
