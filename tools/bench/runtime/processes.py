"""Processes for a measurement: started, joined, and ended if they take too long."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

__all__ = ["on_ranks"]


def on_ranks(size: int, function: Callable[..., Any], *args: Any, timeout: float = 300.0) -> list[Any]:
    """The results of `function(rank, size, *args)` on `size` processes with gloo ready."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_rank, args=(queue, os.path.join(folder, "store"), rank, size, function, args), daemon=True
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        answers: dict[int, Any] = {}
        try:
            for _ in range(size):
                rank, ok, answer = queue.get(timeout=timeout)
                if not ok:
                    raise RuntimeError(f"rank {rank}:\n{answer}")
                answers[rank] = answer
        finally:
            for process in processes:
                process.join(5 if len(answers) == size else 0)
                process.kill()
    return [answers[rank] for rank in range(size)]


def _rank(queue: Any, path: str, rank: int, size: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    _sleep_exactly()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    try:
        store = dist.FileStore(path, size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=1800))
        queue.put((rank, True, function(rank, size, *args)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        queue.put((rank, False, traceback.format_exc()))


def _sleep_exactly() -> None:
    """Linux lets a sleeper oversleep by 50 microseconds unless it is told not to."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK, in nanoseconds
