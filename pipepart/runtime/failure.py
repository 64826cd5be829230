"""Failures of ranks: the first rank that fails writes the cause into the store of the job, and all other ranks show it."""

from __future__ import annotations

import socket
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from pipepart.errors import PipelineError
from pipepart.runtime.leaving import leave_after_failure
from pipepart.runtime.mesh import Groups
from pipepart.runtime.rendezvous import job_store
from pipepart.runtime.silence import answer_of
from pipepart.runtime.watching import Stopped

__all__ = ["Stopped", "check_others", "first_cause", "guarded", "hang_report", "report", "stopped"]

_KEY = "pipepart/first-failure"
_PATIENCE = 3.0  # seconds to wait for the cause of a broken connection
_ANSWER = 5.0  # seconds in which the store must answer
_TOLD = "_pipepart_told"
_TRANSPORT_WORDS = ("gloo/", "Connection closed by peer", "Connection reset by peer", "Timed out waiting", "NCCL")


@contextmanager
def guarded(groups: Groups | None) -> Iterator[None]:
    """Report an error inside to the other ranks, or replace the loss of a connection by its cause on another rank.

    All communication with other ranks belongs inside. Regions may be nested; the innermost region reports an error.
    """
    if groups is None:
        yield
        return
    groups.watching.enter()
    try:
        yield
        groups.watching.check()
    except Exception as error:
        if getattr(error, _TOLD, False):
            raise
        leave_after_failure()
        found = _told(error, groups)
        with suppress(AttributeError):  # an error with slots is reported twice
            setattr(found, _TOLD, True)
        if found is error:
            raise
        raise found from error
    finally:
        groups.watching.leave()


def _told(error: Exception, groups: Groups) -> Exception:
    """Report an error of this rank to the others, and return the error to raise."""
    found = error
    if isinstance(error, Stopped):
        pass
    elif groups.watching.cause is not None:  # the watcher has ended the transfers, and this error follows from that
        found = Stopped(groups.watching.cause)
    elif not _is_lost_connection(error):
        report(groups, f"{groups.where} failed:\n{''.join(traceback.format_exception(error)).rstrip()}")
    elif _is_timeout(error):
        found = PipelineError(hang_report(groups, error))
    else:
        cause = first_cause(groups, _PATIENCE)
        if cause is not None:
            found = PipelineError(stopped(groups, cause))
        else:
            found = PipelineError(f"{groups.where} lost another rank: {error}")
            report(groups, str(found))  # for the ranks that lose this one
    groups.failures.append(str(found).partition("\n")[0])
    return found


def check_others(groups: Groups) -> None:
    """Raise `Stopped` if another rank has failed in this attempt, instead of waiting for it."""
    cause = first_cause(groups)
    if cause is not None:
        raise Stopped(stopped(groups, cause))


def stopped(groups: Groups, cause: str) -> str:
    """Return the text of the error of a rank that stops because of the failure of another."""
    return f"{groups.where} stopped because another rank failed first.\n{cause}"


def _key(groups: Groups) -> str:
    """Return the key for the failure of this attempt; after a failure of all ranks, the next attempt has another key."""
    return f"{_KEY}/{groups.number}/{len(groups.failures)}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


def _is_lost_connection(error: BaseException) -> bool:
    """Return whether the error comes from gloo, NCCL, the store or a socket; all other errors are causes themselves."""
    return any(
        isinstance(seen, (dist.DistError, ConnectionError, TimeoutError))
        or (isinstance(seen, RuntimeError) and any(word in str(seen) for word in _TRANSPORT_WORDS))
        for seen in _chain(error)
    )


def _is_timeout(error: BaseException) -> bool:
    return any(isinstance(seen, TimeoutError) or "Timed out waiting" in str(seen) for seen in _chain(error))


def hang_report(groups: Groups, error: BaseException) -> str:
    """Return the transfers that ranks wait for, as far as they have reported them, and the ranks without a report."""
    said: dict[int, str] = {groups.rank: f"{groups.where} waits: {error}"}
    cause, answered = answer_of(lambda: _collect(groups, said), _PATIENCE + _ANSWER)
    if cause is not None:
        return stopped(groups, cause)
    said = dict(said)  # a thread that waits for the store may still have the other one
    silent = [groups.mesh.describe(rank) for rank in range(groups.mesh.world_size) if rank not in said]
    lines = [f"{groups.where} reached its timeout. Ranks that wait:", *(f"  {said[rank]}" for rank in sorted(said))]
    if not answered and groups.rank != 0:
        lines.append(
            f"  The store of the job, on the host of rank 0, does not answer {socket.gethostname()}: one of the two hosts has "
            "ended, or the network between them is broken."
        )
    if silent:
        lines.append(
            f"  no report from {', '.join(silent)}: stopped, stuck, or still computing. Look at these ranks first; if they "
            "are computing, set a larger timeout."
        )
    return "\n".join(lines)


def _collect(groups: Groups, said: dict[int, str]) -> str | None:
    """Report the wait of this rank, and read those of the others into `said`; returns the first cause of a failure, if any."""
    store, key = job_store(), f"{_key(groups)}/waits"
    store.set(f"{key}/{groups.rank}", said[groups.rank])
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline and len(said) < groups.mesh.world_size:
        for rank in range(groups.mesh.world_size):
            if rank not in said and store.check([f"{key}/{rank}"]):
                said[rank] = store.get(f"{key}/{rank}").decode(errors="replace")
        cause = _written(groups)
        if cause is not None:
            return cause
        time.sleep(0.1)
    return None


def report(groups: Groups, text: str) -> None:
    """Write the cause of a failure into the store of the job, unless another rank has done so before."""

    def write() -> None:
        store = job_store()
        if store.add(_key(groups) + "/count", 1) == 1:
            store.set(_key(groups), text)

    answer_of(write, _ANSWER)  # without rank 0 there is no store, and no rank to report to


def first_cause(groups: Groups, patience: float = 0.0) -> str | None:
    """Return the report of the first rank that failed, or None after `patience` seconds."""

    def look() -> str | None:
        deadline = time.monotonic() + patience
        while True:
            cause = _written(groups)
            if cause is not None or time.monotonic() > deadline:
                return cause
            time.sleep(0.05)

    return answer_of(look, patience + _ANSWER)[0]


def _written(groups: Groups) -> str | None:
    """Return the cause of a failure in the store of the job, or None."""
    store = job_store()
    return store.get(_key(groups)).decode(errors="replace") if store.check([_key(groups)]) else None
