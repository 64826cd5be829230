"""The store on a port of this host in which ranks without a common folder meet: rank 0 serves it, the others reach it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from queue import Empty, Queue

import torch.distributed as dist

from pipepart.errors import ConfigError, PipelineError
from pipepart.runtime.addresses import listen

__all__ = ["abandoned_if", "reach_store", "serve"]

_LOOK = 1.0  # seconds between two looks for a failure
_GRACE = 5.0  # seconds in which torch itself notices the end of the timeout
_failures: list[Callable[[], str | None]] = []
"""Functions that return the failure of another rank of this job, if there is one."""


def serve(port: int, size: int, timeout: timedelta) -> dist.Store:
    """Return the store that this process serves on a port of loopback."""
    try:
        listener = listen(["127.0.0.1"], port)
    except OSError as error:  # another port would not help: the other ranks know this one only
        raise ConfigError(
            f"rank 0 of this job cannot listen on 127.0.0.1:{port}, the port where its ranks meet: {error}. Another job may "
            "use it: set MASTER_PORT to a free port."
        ) from error
    return dist.TCPStore(
        "127.0.0.1", port, size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


@contextmanager
def abandoned_if(failed: Callable[[], str | None]) -> Iterator[None]:
    """Inside, a rank that waits for rank 0 asks for the failure of another rank. A queue ends no rank when another fails."""
    _failures.append(failed)
    try:
        yield
    finally:
        _failures.remove(failed)


def reach_store(port: int, size: int, timeout: timedelta) -> dist.Store:
    """Return the store that rank 0 serves on this port, as soon as it does.

    A thread opens it: torch waits without a limit for another program that uses the port and does not answer.
    """
    answers: Queue[dist.Store | Exception] = Queue()

    def open_store() -> None:
        try:
            answers.put(dist.TCPStore("127.0.0.1", port, size, False, timeout, wait_for_workers=False))
        except Exception as error:
            answers.put(error)

    threading.Thread(target=open_store, name="pipepart-store", daemon=True).start()
    end = time.monotonic() + timeout.total_seconds() + _GRACE
    while time.monotonic() < end:
        with suppress(Empty):
            answer = answers.get(timeout=_LOOK)
            if isinstance(answer, Exception):
                raise answer
            return answer
        if reason := next(filter(None, (failed() for failed in _failures)), None):
            raise PipelineError(f"another rank of this job has failed: {reason}")
    raise ConfigError(
        f"a program uses 127.0.0.1:{port}, the port where the ranks of this job meet, and does not answer as rank 0 would. "
        "Set MASTER_PORT to a free port."
    )
