"""Check models of libraries in two child processes, which are the stages: a crash is a finding, not the end of the run."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from tools.bench.zoo.checks import Report

__all__ = ["Found", "Pair"]


@dataclass
class Found:
    """The row of one model."""

    name: str
    report: Report
    """Of capture, as for the other zoos."""
    pipeline: str = "not run"
    """``equal``, ``flagged``, ``refused``, ``differs``, ``failed``, ``died`` or ``no end``."""
    problems: list[str] = field(default_factory=list)
    dtype: str = ""
    missing: str = ""
    """The library or a need of it that is not installed: the model was not tried."""
    seconds: float = 0.0

    @property
    def library(self) -> str:
        return self.name.partition(".")[0]


class Pair:
    """Two processes that check one model after the other, and are started again when one dies or takes too long."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "torch.distributed", "pipepart", "tools.bench.zoo.checks"])
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def check(self, name: str, timeout: float) -> Found:
        """Capture on the first process, then the pipeline on both."""
        start = time.perf_counter()
        found = Found(name, Report(name))
        if not self._processes:
            self._start()
        with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
            for connection in self._connections:
                connection.send((name, os.path.join(folder, "store"), timeout))
            self._collect(found, time.monotonic() + timeout)
        found.seconds = time.perf_counter() - start
        return found

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        for rank in range(2):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, rank), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _collect(self, found: Found, deadline: float) -> None:
        from tools.bench.zoo.pipelines import together

        shares: dict[int, Any] = {}
        failed: list[str] = []
        ended: set[int] = set()
        while len(ended) < 2:
            waiting = {c: rank for rank, c in enumerate(self._connections) if rank not in ended}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                if not failed:
                    found.pipeline, found.problems = "no end", ["the time for this model was over"]
                self.stop()
                break
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                try:
                    kind, value = connection.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    self._processes[rank].join(5)
                    found.pipeline = "died"
                    found.problems = [f"process {rank} ended with exit code {self._processes[rank].exitcode}"]
                    self.stop()
                    return
                if kind == "captured":
                    found.report = value
                    continue
                ended.add(rank)
                if kind == "missing":
                    found.missing = value
                elif kind == "failed":
                    failed.append(value)
                    deadline = min(deadline, time.monotonic() + 15.0)  # the other one may wait for this one
                else:
                    shares[rank] = value
        if failed:
            found.pipeline, found.problems = "failed", failed[:1]
        elif len(shares) == 2:
            found.pipeline, found.problems = together([shares[0], shares[1]])
            found.dtype = shares[0].dtype


def _serve(connection: Connection, rank: int) -> None:
    import torch
    import torch.distributed as dist

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", GROUP_RANK="0",
        TORCHELASTIC_RUN_ID="zoo", MASTER_ADDR="127.0.0.1", MASTER_PORT="0",
    )  # fmt: skip
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        while True:
            try:
                name, path, timeout = connection.recv()
            except (EOFError, ConnectionError):
                return
            store = dist.FileStore(path, 2)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=timeout))
            dist.barrier()  # both are connected before one may leave again
            try:
                _one(connection, rank, name)
            except BaseException as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                text = " ".join(str(error).split())[:300]
                connection.send(("failed", f"{type(error).__name__}: {text} ({where.filename}:{where.lineno})"))
                if os.environ.get("ZOO_TRACES"):
                    traceback.print_exc(file=sys.stderr)
            finally:
                dist.destroy_process_group()


def _one(connection: Connection, rank: int, name: str) -> None:
    import torch

    from tools.bench.zoo import images, libraries
    from tools.bench.zoo.checks import check_model
    from tools.bench.zoo.pipelines import check_share

    if name.startswith(("lightly.", "vit_pytorch.")):  # transformers would take the stub for the real one
        images.stub_torchvision()
    build = libraries.ARCHITECTURES[name]
    torch.manual_seed(0)
    try:
        model, example = build()
    except ImportError as error:
        connection.send(("missing", str(error)))
        return
    if rank == 0:
        report = check_model(name, model, example)
        connection.send(("captured", dataclasses.replace(report)))
    connection.send(("share", check_share(build)))
