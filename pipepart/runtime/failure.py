"""When one rank fails, every rank says why: the first cause is left in the job's store before connections break."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from pipepart.errors import PipelineError
from pipepart.runtime.leaving import leave_after_failure
from pipepart.runtime.mesh import Groups

__all__ = ["Stopped", "check_others", "first_cause", "guarded"]

_KEY = "pipepart/first-failure"
_PATIENCE = 3.0  # seconds to wait for the rank that caused a broken connection to say why
_TOLD = "_pipepart_told"


class Stopped(PipelineError):
    """Another rank has failed, and this one must not wait for it any longer."""


@contextmanager
def guarded(groups: Groups | None) -> Iterator[None]:
    """Around everything that talks to other ranks: leave the cause where they find it, or find it for this rank.

    Regions may be nested; the innermost one that an error passes tells the others.
    """
    if groups is None:
        yield
        return
    try:
        yield
    except Exception as error:
        if getattr(error, _TOLD, False):
            raise
        leave_after_failure()
        found = _told(error, groups)
        with suppress(AttributeError):  # an error with slots is told twice
            setattr(found, _TOLD, True)
        if found is error:
            raise
        raise found from error


def _told(error: Exception, groups: Groups) -> Exception:
    """Tell the other ranks of an error here; the error to raise for it."""
    found = error
    if isinstance(error, Stopped):
        pass
    elif not _is_lost_connection(error):
        _leave(groups, f"{_where(groups)} failed:\n{''.join(traceback.format_exception(error)).rstrip()}")
    elif _is_timeout(error):
        found = PipelineError(_hang_report(groups, error))
    else:
        cause = first_cause(groups, _PATIENCE)
        if cause is not None:
            found = PipelineError(f"{_where(groups)} stopped because another rank failed first.\n{cause}")
        else:
            found = PipelineError(f"{_where(groups)} lost another rank: {error}")
            _leave(groups, str(found))  # so that those who lose this one know why
    groups.failures.append(str(found).partition("\n")[0])
    return found


def check_others(groups: Groups) -> None:
    """Raise if another rank has failed since this one has done so last: it will not come to where this one waits."""
    cause = first_cause(groups)
    if cause is not None:
        raise Stopped(f"{_where(groups)} stopped because another rank failed first.\n{cause}")


def _key(groups: Groups) -> str:
    """Where the failure of this attempt is left: after a failure of all ranks, the next attempt begins anew."""
    return f"{_KEY}/{groups.number}/{len(groups.failures)}"


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
        key = f"{_key(groups)}/waits"
        store.set(f"{key}/{groups.rank}", said[groups.rank])
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline and cause is None and len(said) < groups.mesh.world_size:
            for rank in range(groups.mesh.world_size):
                if rank not in said and store.check([f"{key}/{rank}"]):
                    said[rank] = store.get(f"{key}/{rank}").decode(errors="replace")
            cause = first_cause(groups)
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


def _leave(groups: Groups, text: str) -> None:
    with suppress(Exception):  # the store may be gone with rank 0; then there is nobody left to tell
        store = dist.distributed_c10d._get_default_store()
        if store.add(_key(groups) + "/count", 1) == 1:
            store.set(_key(groups), text)


def first_cause(groups: Groups, patience: float = 0.0) -> str | None:
    """What the first failing rank left behind, if it did."""
    deadline = time.monotonic() + patience
    with suppress(Exception):
        store = dist.distributed_c10d._get_default_store()
        while True:
            if store.check([_key(groups)]):
                return store.get(_key(groups)).decode(errors="replace")
            if time.monotonic() > deadline:
                return None
            time.sleep(0.05)
    return None
