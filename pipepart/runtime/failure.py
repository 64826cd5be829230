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
            if _is_timeout(error):
                raise PipelineError(_hang_report(groups, error)) from error
            cause = first_cause(_PATIENCE)
            if cause is not None:
                raise PipelineError(f"{_where(groups)} stopped because another rank failed first.\n{cause}") from error
            _leave(f"{_where(groups)} lost another rank: {error}")  # so that those who lose this one know why
            raise PipelineError(f"{_where(groups)} lost another rank: {error}") from error
        _leave(f"{_where(groups)} failed:\n{''.join(traceback.format_exception(error)).rstrip()}")
        raise


def _where(groups: Groups) -> str:
    return f"rank {groups.rank} (replica {groups.replica}, stage {groups.stage})"


def _is_lost_connection(error: BaseException) -> bool:
    """Errors of the transport, from gloo, NCCL or the store; all else is a cause of its own."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, (dist.DistError, ConnectionError, TimeoutError)):
            return True
        text = str(seen)
        if isinstance(seen, RuntimeError) and any(word in text for word in _TRANSPORT_WORDS):
            return True
        seen = seen.__cause__
    return False


_TRANSPORT_WORDS = ("gloo/", "Connection closed by peer", "Connection reset by peer", "Timed out waiting", "NCCL")


def _is_timeout(error: BaseException) -> bool:
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, TimeoutError) or "Timed out waiting" in str(seen):
            return True
        seen = seen.__cause__
    return False


def _hang_report(groups: Groups, error: BaseException) -> str:
    """Who waits for what, as far as the ranks have said it; who says nothing is the one to look at."""
    said: dict[int, str] = {groups.rank: f"{_where(groups)} waits: {error}"}
    cause = None
    with suppress(Exception):
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{_KEY}/waits/{groups.rank}", said[groups.rank])
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline and cause is None and len(said) < groups.mesh.world_size:
            for rank in range(groups.mesh.world_size):
                if rank not in said and store.check([f"{_KEY}/waits/{rank}"]):
                    said[rank] = store.get(f"{_KEY}/waits/{rank}").decode(errors="replace")
            cause = first_cause()
            time.sleep(0.1)
    if cause is not None:
        return f"{_where(groups)} stopped because another rank failed first.\n{cause}"
    silent = [rank for rank in range(groups.mesh.world_size) if rank not in said]
    lines = [f"{_where(groups)} waited too long. Who waits for what:", *(f"  {said[rank]}" for rank in sorted(said))]
    if silent:
        named = ", ".join(
            f"rank {r} (replica {groups.mesh.replica_of(r)}, stage {groups.mesh.stage_of(r)})" for r in silent
        )
        lines.append(f"  nothing from {named}: stopped, stuck, or still at work (then a larger timeout helps)")
    return "\n".join(lines)


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
