"""The store on a port in which ranks without a common folder meet: one process serves it, the others reach it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from pipepart.errors import ConfigError, PipelineError
from pipepart.runtime.addresses import listen, reach
from pipepart.runtime.silence import answer_of

__all__ = ["abandoned_if", "reached_store", "store_on_this_host"]

_GREETING = 60.0  # seconds in which a store must greet
_LOOPBACK = "127.0.0.1"
_failures: list[Callable[[], str | None]] = []
"""Functions that return the failure of another rank of this job, if there is one."""


@contextmanager
def abandoned_if(failed: Callable[[], str | None]) -> Iterator[None]:
    """Inside, a rank that waits for a store asks for the failure of another rank. A queue ends no rank when another fails."""
    _failures.append(failed)
    try:
        yield
    finally:
        _failures.remove(failed)


def store_on_this_host(port: int, rank: int, timeout: timedelta) -> dist.Store:
    """Return the store on a port of loopback, which rank 0 serves."""
    if rank != 0:
        return reached_store([_LOOPBACK], port, timeout, "MASTER_PORT")[1]
    try:
        listener = listen([_LOOPBACK], port)
    except OSError as error:  # another port would not help: the other ranks know this one only
        raise ConfigError(
            f"rank 0 of this job cannot listen on {_LOOPBACK}:{port}, the port where its ranks meet: {error}. Another job may "
            "use it: set MASTER_PORT to a free port."
        ) from error
    return dist.TCPStore(
        _LOOPBACK, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def reached_store(
    addresses: list[str], port: int, timeout: timedelta, source: str, note: Callable[[str], None] | None = None
) -> tuple[str, dist.Store]:
    """Wait until another process serves a store at one of these addresses, and return the address and the store.

    torch would wait without an end for a program that takes connections and says nothing.
    """
    wait = timeout.total_seconds()
    place = reach(addresses, port, wait, source, note, _check)
    store, _ = answer_of(
        lambda: dist.TCPStore(place, port, None, False, timeout, wait_for_workers=False), min(wait, _GREETING), _check
    )
    if store is None:
        raise ConfigError(
            f"the program that listens on {place} port {port} is no store of torch, and this job cannot meet there. "
            f"The address comes from {source}. Choose another port."
        )
    return place, store


def _check() -> None:
    if reason := next(filter(None, (failed() for failed in _failures)), None):
        raise PipelineError(f"another rank of this job has failed: {reason}")
