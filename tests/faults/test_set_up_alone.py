"""One rank alone fails while a pipeline is set up, and its process lives on: all ranks end with its cause, none waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from support.lightning_modules import Module, loader
from support.models import build
from support.ranks import run_ranks
from torch import nn

from pipepart import Pipeline, PipelineStrategy
from pipepart import pipeline as plain
from pipepart.build import agreement, path
from pipepart.build import batch_verdict as samples
from pipepart.runtime import stage

CAUSE = "the cause of it all"
SOON = 30.0
"""Seconds from the failure of one rank to the end of the others, on a loaded machine; timeouts are ten times as long."""

PLACES: dict[str, tuple[Any, str]] = {
    "cutting the example": (path, "example_microbatch"),
    "recording": (plain, "record"),
    "the batch check": (samples, "look_at_samples"),
    "measuring costs": (agreement, "profiled"),
    "planning": (agreement, "search"),
    "checking that the plan fits": (agreement, "_check_fits"),
    "proving the chunks": (agreement, "prove_chunks"),
    "laying out the stage": (stage, "choose_transport"),
    "the seed": (plain, "seed_of_rank_zero"),
}


def _raises(*args: Any, **kwargs: Any) -> Any:
    _mark()
    raise ValueError(CAUSE)


def _mark() -> None:
    dist.distributed_c10d._get_default_store().set("failed at", str(time.time()))


def _ended(action: Callable[[], None]) -> tuple[str, str, float]:
    """How an action ends on this rank, and how long after the failure; the process then lives until all have ended."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    try:
        action()
        found = ("nothing", "")
    except Exception as error:
        found = (type(error).__name__, str(error))
    after = time.time() - float(store.get("failed at")) if store.check(["failed at"]) else -1.0
    store.set(f"ended/{rank}", "yes")
    store.wait([f"ended/{other}" for other in range(dist.get_world_size())], timedelta(seconds=2 * SOON))
    return (*found, after)


def _pipeline(rank: int, place: str) -> tuple[str, str, float]:
    module, name = PLACES[place]
    original = getattr(module, name)
    if dist.get_rank() == rank:
        setattr(module, name, _raises)
    model = build("mlp")
    try:
        return _ended(lambda: Pipeline(model, model.batch(8), stages=2, microbatches=2, timeout=10 * SOON) and None)
    finally:
        setattr(module, name, original)


@pytest.mark.parametrize(
    ("rank", "place"),
    [(1, place) for place in PLACES if place not in ("the batch check", "planning", "proving the chunks")]
    + [(0, place) for place in PLACES],
)
def test_a_rank_that_fails_alone_in_set_up_is_not_waited_for(rank: int, place: str) -> None:
    answers = run_ranks(2, _pipeline, rank, place, timeout=6 * SOON)
    assert answers[rank][:2] == ("ValueError", CAUSE)
    kind, text, after = answers[1 - rank]
    assert kind in ("Stopped", "PipelineError")  # by what was left, or by a connection that broke
    assert CAUSE in text and f"rank {rank} (replica 0, stage {rank}) failed" in text
    assert 0 <= after < SOON


class Other(nn.Module):
    """Is another model on another rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.Tanh())])
        self.rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layers(x)
        return (out + 1 if self.rank else out).mean()


def _other_models() -> tuple[str, str, float]:
    return _ended(lambda: Pipeline(Other(dist.get_rank()), (torch.randn(4, 4),), stages=2, microbatches=2) and None)


def test_ranks_that_record_different_models_all_say_so() -> None:
    answers = run_ranks(2, _other_models, timeout=6 * SOON)
    assert answers[1][0] == "PlanError" and "the model differs between ranks" in answers[1][1]
    assert "the model differs between ranks" in answers[0][1]


def _twice() -> float:
    """A refusal of all ranks, and a rank that fails alone, do not spoil the attempts after them."""
    model = build("mlp")
    for options in ({"stages": 2, "split_at": ["no such layer"]}, {"stages": 2, "microbatches": 99}):
        with pytest.raises(Exception, match=r"no such layer|99"):
            Pipeline(model, model.batch(8), timeout=10 * SOON, **options)
    pipe = Pipeline(model, model.batch(8), stages=2, microbatches=2, timeout=10 * SOON)
    return float(pipe.step(*model.batch(8)))


def test_the_next_attempt_begins_anew() -> None:
    losses = run_ranks(2, _twice, timeout=6 * SOON)
    assert losses[0] == losses[1]


class Refusing(Module):
    def configure_optimizers(self) -> Any:
        if self.trainer.global_rank == 1:
            _raises()
        return super().configure_optimizers()


def _trainer() -> tuple[str, str, float]:
    strategy = PipelineStrategy(stages=2, microbatches=2, timeout=10 * SOON)
    trainer = L.Trainer(
        strategy=strategy, devices=2, accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    return _ended(lambda: trainer.fit(Refusing("mlp"), loader("mlp", 8, 4)))


def test_under_the_trainer() -> None:
    answers = run_ranks(2, _trainer, timeout=6 * SOON)
    assert answers[1][:2] == ("ValueError", CAUSE)
    assert CAUSE in answers[0][1] and 0 <= answers[0][2] < SOON
