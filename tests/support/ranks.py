"""Run a function on several real processes, with a time limit, and leave none behind.

Starting processes that import torch and lightning takes seconds, so there is one pool per world size for the whole
test session, or for each worker where tests run side by side. Each case gets process groups of its own. A case that
fails or takes too long costs the pool, which is killed and started again: nothing of it can reach the next case.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

__all__ = ["RanksFailed", "error_of", "run_ranks", "run_standin", "stop_pools"]


class RanksFailed(AssertionError):
    """Some ranks raised, died or did not finish in time. The message starts with the first cause."""


class _Pool:
    def __init__(self, size: int, standin: bool = False) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "lightning.pytorch", "pipepart", "numpy"])
        self.size, self.standin = size, standin
        self.processes, self.connections = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_worker, args=(theirs, rank, size, standin), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)
        self._await_start()

    def _await_start(self) -> None:
        """The time limit of a case counts from here: importing the libraries may take a minute on a busy machine."""
        for rank, connection in enumerate(self.connections):
            try:
                if connection.poll(_START):
                    connection.recv()
                    continue
            except (EOFError, ConnectionError):
                pass
            self.kill()
            raise RanksFailed(f"rank {rank} did not start within {_START:.0f} s, or died before it was ready")

    def run(
        self, function: Callable[..., Any], args: tuple, kwargs: dict, timeout: float, eager: bool = False
    ) -> list[Any]:
        with tempfile.TemporaryDirectory(prefix="pipepart-ranks-") as folder:
            for connection in self.connections:
                connection.send((function, args, kwargs, os.path.join(folder, "store"), timeout, eager))
            return self._collect(time.monotonic() + timeout)

    def _collect(self, deadline: float) -> list[Any]:
        answers: dict[int, tuple[float, bool, Any]] = {}
        by_connection = {connection: rank for rank, connection in enumerate(self.connections)}
        while len(answers) < self.size:
            open_ones = [c for c, rank in by_connection.items() if rank not in answers]
            ready = wait(open_ones, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = sorted(set(range(self.size)) - set(answers))
                time.sleep(_DUMP)  # each prints its stack to stderr, which pytest shows
                self._fail(answers, f"rank(s) {missing} did not finish in time")
            for connection in ready:
                rank = by_connection[connection]  # type: ignore[index]
                try:
                    answers[rank] = connection.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    self.processes[rank].join(1)
                    answers[rank] = (time.time(), False, f"rank {rank} died, exit code {self.processes[rank].exitcode}")
            if any(not ok for _, ok, _ in answers.values()):  # the others get a moment to end by themselves
                deadline = min(deadline, time.monotonic() + 10.0)
        if any(not ok for _, ok, _ in answers.values()):
            self._fail(answers, "")
        return [answers[rank][2] for rank in range(self.size)]

    def _fail(self, answers: dict[int, tuple[float, bool, Any]], more: str) -> None:
        self.kill()
        errors = sorted((when, rank, text) for rank, (when, ok, text) in answers.items() if not ok)
        parts = [f"rank {rank}:\n{text}" for _, rank, text in errors]
        raise RanksFailed("\n".join([*parts, more] if more else parts))

    def kill(self) -> None:
        for process in self.processes:
            _signal(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.join(5)
        for connection in self.connections:
            connection.close()
        _pools.pop((self.size, self.standin), None)


def _signal(pid: int | None, number: int) -> None:
    try:
        if pid is not None:
            os.kill(pid, number)
    except ProcessLookupError:
        pass


_pools: dict[tuple[int, bool], _Pool] = {}
"""By world size and whether it has the stand-in device, the one that was used last at the end."""
_DUMP = 2.0
"""Seconds in which ranks that have not finished in time print their stacks."""
_START = 300.0
"""Seconds in which the processes of a pool must be ready."""
_MOST = 14
"""Processes in all pools: workers that run tests side by side share the memory of the host."""


def run_ranks(size: int, function: Callable[..., Any], *args: Any, timeout: float = 300.0, **kwargs: Any) -> list[Any]:
    """Call `function(*args, **kwargs)` on `size` ranks with torch.distributed ready (gloo); their results in order."""
    return _pool(size, standin=False).run(function, args, kwargs, timeout)


def run_standin(
    function: Callable[..., Any],
    *args: Any,
    ranks: int = 1,
    timeout: float = 120.0,
    eager: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Call `function(*args, **kwargs)` on ranks that each have a device of the stand-in; their results in order.

    Rank r has standin:r as its current device. torch.distributed is ready for CPU tensors (gloo) and for tensors of the
    device (standin_ccl); with `eager`, the group is bound to the device. The test is skipped where nothing can be compiled.
    """
    import pytest

    from support.standin import built_library, unavailable

    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    built_library()  # before the time limit counts
    return _pool(ranks, standin=True).run(function, args, kwargs, timeout, eager)


def _pool(size: int, standin: bool) -> _Pool:
    pool = _pools.pop((size, standin), None)
    while pool is None and _pools and sum(other for other, _ in _pools) + size > _MOST:
        next(iter(_pools.values())).kill()
    _pools[size, standin] = pool or _Pool(size, standin)
    return _pools[size, standin]


def error_of(function: Callable[..., Any], *args: Any) -> str:
    """The error of pipepart that a call raises on this rank, as text: as a result of a rank, it does not cost the pool."""
    from pipepart.errors import PipepartError

    try:
        function(*args)
    except PipepartError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def stop_pools() -> None:
    for pool in list(_pools.values()):
        pool.kill()


atexit.register(stop_pools)


def _measure_briefly() -> None:
    """Time a whole step a few times instead of for 1.5 s: these cases compare values, and each of them measures a model."""
    from pipepart.cost import timing

    module: Any = sys.modules["pipepart.cost.profile"]  # the package has a function of that name
    module.time_step = partial(timing.time_step, steps=(3, 5), budget=0.1)
    timing._FEW_STEPS = (3, 5)


def _prepare_standin(rank: int) -> None:
    """The state of the device as it is at the start of a process."""
    import torch

    from support import standin
    from support.standin import process_group

    standin.enable()
    standin.reset_all()
    process_group.reset_failures()
    torch.accelerator.set_device_index(rank)


def _worker(connection: Connection, rank: int, size: int, standin: bool) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(  # as torchrun would set them, so that Lightning sees processes that were started for it
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        GROUP_RANK="0",
        TORCHELASTIC_RUN_ID="tests",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )
    _measure_briefly()
    if standin:
        os.environ["STANDIN_DEVICES"] = str(max(4, size))
        _prepare_standin(rank)
    gc.freeze()  # the libraries stay anyway; searching them after each case would take longer than many cases
    connection.send("ready")
    while True:
        try:
            function, args, kwargs, path, timeout, eager = connection.recv()
        except (EOFError, ConnectionError):
            return
        try:
            from datetime import timedelta

            faulthandler.dump_traceback_later(
                timeout
            )  # no signal: a Trainer resets the handlers of signals when it ends
            torch.manual_seed(0)
            if standin:
                _prepare_standin(rank)
            if size > 1:
                store = dist.FileStore(path, size)
                dist.init_process_group(
                    "cpu:gloo,standin:standin_ccl" if standin else "gloo",
                    store=store,
                    rank=rank,
                    world_size=size,
                    timeout=timedelta(seconds=timeout),
                    device_id=torch.device("standin", rank) if eager else None,
                )
                dist.all_reduce(torch.zeros(1))  # a rank with a short case must not leave while another one connects
            answer = (True, function(*args, **kwargs))
        except BaseException:
            answer = (False, traceback.format_exc())
            if standin and dist.is_initialized():  # leaving a group waits for what was posted
                dist.distributed_c10d._abort_process_group()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            gc.collect()  # pipelines of this case close their sockets
            faulthandler.cancel_dump_traceback_later()
        try:
            connection.send((time.time(), *answer))
        except Exception:
            connection.send((time.time(), False, traceback.format_exc()))
