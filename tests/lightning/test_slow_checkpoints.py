"""Checkpoints that take longer to write than ranks wait for each other in a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from pipepart.lightning.checkpoint_files import CheckpointError
from pipepart.lightning.checkpoints import Checkpoints
from pipepart.lightning.ranks import Ranks
from pipepart.lightning.strategy_options import StrategyOptions


def _checkpoints(timeout: float, folder: str) -> Checkpoints:
    """Checkpoints of a job whose groups are its own, with this timeout."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # a rank that leaves at once would disturb the connection of the other
    dist.destroy_process_group()
    dist.init_process_group("cpu:gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    ranks = Ranks(StrategyOptions(stages=size, timeout=timeout), lambda: size, lambda: torch.device("cpu"))
    ranks.barrier()
    return Checkpoints(ranks, lambda: False)


def _slow(folder: str) -> list[str]:
    """Rank 0 writes for longer than the timeout, twice; then it fails, which the other rank sees at once."""
    checkpoints, found = _checkpoints(3.0, folder), []

    def write(seconds: float, failure: str = "") -> None:
        time.sleep(seconds)
        if failure:
            raise OSError(failure)

    actions: list[Callable[[], Any]] = [lambda: write(5.0), lambda: write(0.0), lambda: write(0.2, "disk is full")]
    for action in actions:
        began = time.monotonic()
        try:
            checkpoints.on_rank_zero(action)
            found.append("written")
        except (CheckpointError, OSError) as error:
            found.append(str(error))
        assert time.monotonic() - began < 20
    return found


@pytest.mark.slow
def test_ranks_wait_for_a_write_that_takes_longer_than_a_step_may(tmp_path: Path) -> None:
    first, second = run_ranks(2, _slow, str(tmp_path), timeout=60)
    assert first == ["written", "written", "disk is full"]
    assert second == ["written", "written", "rank 0 failed: disk is full"]
