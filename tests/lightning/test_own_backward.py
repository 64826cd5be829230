"""Modules that override `backward`: equal to one process, or refused by name on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stateful import Auto, loaders
from support.ranks import run_ranks
from watching import assert_same_run, assert_same_state, run_fit

from pipepart import PipelineStrategy
from pipepart.errors import PipepartError


class Plain(Auto):
    """A step with one loss; the classes below it differ in their backward."""

    calls = 0

    def training_step(self, batch, batch_idx):
        loss, _ = self.losses(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.losses(batch)[0])

    def backward(self, loss, *args, **kwargs):
        self.calls += 1
        loss.backward(*args, **kwargs)


class Parent(Plain):
    def backward(self, loss):
        super().backward(loss)


class Squared(Plain):
    """The factor of the gradients depends on the loss."""

    def backward(self, loss):
        (3 * loss**2).backward()


class Twice(Plain):
    def backward(self, loss):
        loss.backward(retain_graph=True)
        (loss / 2).backward()


class Sometimes(Plain):
    """Leaves out the second batch of each epoch."""

    def backward(self, loss):
        if self.trainer.fit_loop.batch_idx != 1:
            loss.backward()


class Clipping(Plain):
    """Reads and changes the gradients of all stages."""

    def backward(self, loss):
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class ScaledByReplica(Plain):
    def backward(self, loss):
        (2 * loss).backward()


_CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "parent": (Parent, {}),
    "squared": (Squared, {}),
    "twice": (Twice, {}),
    "sometimes": (Sometimes, {}),
    "clipping": (Clipping, {}),
    "accumulated": (Squared, {"accumulate_grad_batches": 2}),
}


def _fit(names: list[str], pipeline: bool) -> dict[str, Any]:
    found = {}
    for name in names:
        make, options = _CASES[name]
        strategy: Any = PipelineStrategy(stages=2, microbatches=3) if pipeline else "auto"
        module = make()
        found[name] = run_fit(module, *loaders(), strategy, 2 if pipeline else 1, **options)
        found[name]["calls"] = module.calls
    return found


@pytest.mark.slow
def test_equal_to_one_process() -> None:
    names = list(_CASES)
    expected, answers = _fit(names, False), run_ranks(2, _fit, names, True)
    for name in names:
        for rank, answer in enumerate(answers):
            assert_same_run(answer[name], expected[name], f"{name} on rank {rank}")
            assert answer[name]["calls"] == expected[name]["calls"]
        assert_same_state(answers[0][name]["state"], expected[name]["state"], name)


def _with_replicas() -> tuple[dict[str, Any], str]:
    strategy = PipelineStrategy(stages=1, replicas=2, microbatches=2)
    fine = run_fit(Parent(), *loaders(), strategy, 2, accumulate_grad_batches=2)
    try:
        run_fit(ScaledByReplica(), *loaders(), PipelineStrategy(stages=1, replicas=2, microbatches=2), 2)
    except PipepartError as error:
        return fine, str(error)
    return fine, "nothing was raised"


@pytest.mark.slow
def test_replicas_that_scale_their_gradients_are_refused() -> None:
    expected = run_fit(Parent(), *loaders(), "auto", 1, accumulate_grad_batches=2)
    for fine, words in run_ranks(2, _with_replicas):
        assert "ScaledByReplica.backward differentiates 2 times the loss of the step" in words
        assert fine["losses"] == pytest.approx(expected["losses"])  # both replicas read the same data
