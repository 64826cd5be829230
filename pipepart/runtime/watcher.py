"""The watcher of a rank on an accelerator: a thread that ends the transfers of this rank when the job has failed.

A transfer of an accelerator is work of the device: it neither raises nor returns if the other end is lost, and the host that
waits for the device waits for ever. So a thread looks for failures: one that a rank has reported in the store of the job, a
process of this host that has ended without leaving, and no progress of this rank for its timeout. Then it aborts the
communicators, the host returns from its wait, and `Watching` raises the cause.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from pipepart.devices import computes_on_host
from pipepart.runtime.failure import first_cause, hang_report, report, stopped
from pipepart.runtime.leaving import released_with
from pipepart.runtime.mesh import Groups
from pipepart.runtime.rendezvous import job_store

__all__ = ["watch"]

_LOOK = 0.25  # seconds between two looks
_PATIENCE = 1.0  # seconds in which the cause of the end of a process may still appear in the store


def watch(groups: Groups | None) -> None:
    """Start the watcher of this rank, if it computes on an accelerator. Every rank of the job must call it."""
    if groups is None or computes_on_host(groups.device):
        return
    store = job_store()
    store.set(_process(groups, groups.rank), json.dumps([_host(), os.getpid()]))
    stop = threading.Event()
    thread = threading.Thread(target=_run, args=(weakref.ref(groups), stop), name="pipepart-watcher", daemon=True)
    released_with(groups, _leave, stop, store, f"{_process(groups, groups.rank)}/left")
    thread.start()


def _leave(stop: threading.Event, store: dist.Store, key: str) -> None:
    """End the watcher, and tell the others that this rank leaves without a failure."""
    stop.set()
    with suppress(Exception):
        if dist.is_initialized():  # else the store is gone, and its file may be: a call would wait for it
            store.set(key, "")


def _process(groups: Groups, rank: int) -> str:
    return f"pipepart/process/{groups.number}/{rank}"


def _host() -> str:
    """Return a name for the processes that this process can see: a host, or a container of it."""
    space = "?"
    with suppress(OSError):
        space = str(os.stat("/proc/self/ns/pid").st_ino)
    return f"{socket.gethostname()}/{space}"


def _run(reference: weakref.ref[Groups], stop: threading.Event) -> None:
    others: dict[int, int] = {}
    while not stop.wait(_LOOK):
        groups = reference()
        if groups is None:
            return
        cause = None
        with suppress(Exception):  # the store ends with rank 0
            cause = _found(groups, others, stop)
        if cause is not None and not stop.is_set():
            groups.watching.cause = cause
            _abort(groups.watching.groups, groups.device)
            return
        del groups


def _found(groups: Groups, others: dict[int, int], stop: threading.Event) -> str | None:
    """Return the text of the error for this rank if the job has failed. `others`: process ids by rank, as far as known."""
    told = first_cause(groups)
    if told is not None:
        return stopped(groups, told)
    lost = _lost(groups, others)
    if lost is not None:
        told = first_cause(groups, _PATIENCE)
        if told is None and not stop.is_set():
            told = f"{groups.mesh.describe(lost)} has ended without leaving the job: process {others[lost]} is gone."
            report(groups, told)
        return None if told is None else stopped(groups, told)
    watching = groups.watching
    if watching.depth and time.monotonic() - watching.since > groups.timeout:
        return hang_report(groups, TimeoutError(f"no progress for {groups.timeout:.0f} s, at {watching.doing}"))
    return None


def _lost(groups: Groups, others: dict[int, int]) -> int | None:
    """Return a rank of this host whose process has ended, although the rank has not left."""
    store, here = job_store(), _host()
    for rank in range(groups.mesh.world_size):
        if rank == groups.rank:
            continue
        key = _process(groups, rank)
        if rank not in others and store.check([key]):
            host, process = json.loads(store.get(key))
            others[rank] = int(process) if host == here else 0
        if others.get(rank) and _ended(others[rank]) and not store.check([f"{key}/left"]):
            return rank
    return None


def _ended(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _abort(groups: list[dist.ProcessGroup], device: torch.device) -> None:
    """End all transfers on the device, so that nothing waits for them. Communicators are aborted together, if possible."""
    backends: list[Any] = []
    for group in groups:
        with suppress(Exception):
            backends.append(group._get_backend(device))
    together = [backend for backend in backends[:1] if hasattr(backend, "_group_start")]
    for backend in together:
        backend._group_start()
    for backend in backends:
        with suppress(Exception):
            backend.abort()
    for backend in together:
        backend._group_end()
