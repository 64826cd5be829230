"""The default process group may be one of the user's, without a backend for host memory: nothing in a run uses it."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from support.lightning_modules import Module, loader
from support.ranks import run_ranks
from watching import QUIET

import pipepart.lightning
from pipepart import PipelineStrategy
from pipepart.lightning import run_patches
from pipepart.lightning.run_patches import RunPatches, Signals
from pipepart.runtime import Groups, Mesh

COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "barrier",
    "all_gather",
    "gather",
    "broadcast_object_list",
    "all_gather_object",
)


def _without_group(path: Path) -> list[str]:
    """Calls of collectives in a file that name no group."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            not isinstance(node, ast.Call)
            or not isinstance(node.func, ast.Attribute)
            or node.func.attr not in COLLECTIVES
        ):
            continue
        if ast.unparse(node.func.value) == "dist" and "group" not in [keyword.arg for keyword in node.keywords]:
            found.append(f"{path.name}:{node.lineno}")
    return found


def test_each_collective_names_its_group() -> None:
    folder = Path(pipepart.lightning.__file__).parent
    assert not [place for path in sorted(folder.glob("*.py")) for place in _without_group(path)]


def _refused(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    def collective(*args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group") or next((arg for arg in args if isinstance(arg, dist.ProcessGroup)), None)
        assert group is not None and group is not dist.group.WORLD, f"{name} on the default group"
        return original(*args, **kwargs)

    return collective


def _fit(folder: str) -> tuple[list[float], list[int]]:
    """Fit, validate and save with collectives that refuse the default group, whose name is not that of a plain gloo group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("cpu:gloo", store=store, rank=rank, world_size=size)
    before = {name: getattr(dist, name) for name in COLLECTIVES}
    for name, original in before.items():
        setattr(dist, name, _refused(original, name))
    try:
        strategy = PipelineStrategy(stages=2, microbatches=2, schedule="1f1b")
        options = {**QUIET, "enable_checkpointing": True, "default_root_dir": folder, "gradient_clip_val": 1.0}
        trainer = L.Trainer(strategy=strategy, devices=size, max_epochs=1, **options)
        module = Module("mlp")
        told = [int(trainer.strategy.broadcast(rank, 1))]  # before a run
        trainer.fit(module, loader("mlp", 16, 4), loader("mlp", 8, 4))
        trainer.strategy.barrier()
        told.append(int(trainer.strategy.reduce(torch.tensor(rank), reduce_op="sum")))
        told.append(int(trainer.strategy.reduce_boolean_decision(rank == 0)))
        return module.seen, told
    finally:
        for name, original in before.items():
            setattr(dist, name, original)


@pytest.mark.slow
def test_a_run_beside_a_default_group_that_is_not_ours(tmp_path: Path) -> None:
    answers = run_ranks(2, _fit, str(tmp_path))
    assert answers[0][0] == answers[1][0] and len(answers[0][0]) == 4
    assert [told for _, told in answers] == [[1, 0, 0], [1, 1, 0]]


# ---- flags of signals


def _exchanges(pauses: list[tuple[str, float]], signal_at: int, behind: int = 0) -> tuple[list[int], int | None]:
    """The calls of `agree` that exchange flags, and the one after which the ranks know that rank 1 got a signal."""
    trainer = L.Trainer(strategy=PipelineStrategy(stages=2), devices=2, **QUIET)
    signals = Signals(trainer, Groups.create(Mesh(1, 2), timedelta(seconds=60)), RunPatches())
    counts, seen = [], None
    original = run_patches.reduce_later

    def counted(*args: Any, **kwargs: Any) -> Any:
        counts.append(call)
        return original(*args, **kwargs)

    run_patches.reduce_later = counted
    try:
        for call, (kind, pause) in enumerate(pauses):
            time.sleep(pause)
            if call == signal_at and dist.get_rank() == 1:
                signals._on_sigterm(15, None)
            signals.agree(kind, behind if call < len(pauses) - 1 else 0)
            if seen is None and trainer.received_sigterm:
                seen = call
    finally:
        run_patches.reduce_later = original
    return counts, seen


def test_flags_are_exchanged_each_few_short_steps_and_after_each_long_one() -> None:
    short = [("training_step", 0.0)] * 60
    long = [("validation_step", 0.12)] * 3
    one, other = run_ranks(2, _exchanges, [*short, *long], 5)
    assert one == other
    counts, seen = one
    assert len([call for call in counts if call < 60]) <= 30, "a fraction of the short steps"
    assert [call for call in counts if call >= 60] == [60, 61, 62], "a new kind of step, and long steps, each time"
    assert seen is not None and 5 <= seen <= 21


def test_ranks_see_a_signal_at_the_same_step_while_exchanges_are_under_way() -> None:
    one, other = run_ranks(2, _exchanges, [("predict_step", 0.6)] * 8, 3, 2)
    assert one == other
    assert one == (list(range(8)), 5), "two exchanges are under way when a third begins"
