"""Segments of a step with manual optimization: what they compute again, carry, train and set back, and their proof."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipepart.errors import CaptureError
from pipepart.lightning.lightning_step import Logs, record_lightning_step
from pipepart.lightning.manual_step import OptimizerOutline
from pipepart.recording import Recording
from pipepart.recording.proof.segment_proof import prove_segments
from pipepart.recording.segments import Act, Segment, cut_segments


class Two(nn.Module):
    """Stands for a LightningModule: two networks, two optimizers."""

    automatic_optimization = False

    def __init__(self, body: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.maker = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6))
        self.judge = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.body = body
        self.double()

    def training_step(self, batch, batch_idx):
        return self.body(self, batch)


def cut(body: Any) -> tuple[Recording, tuple[Segment, ...], list[Act], list[Any], list[Any]]:
    module, logs = Two(body), Logs()
    names = [name for name, _ in module.named_parameters()]
    groups = [tuple(name for name in names if name.startswith(part)) for part in ("maker", "judge")]
    batch = torch.randn(6, 4, dtype=torch.float64)
    outline = OptimizerOutline(tuple(groups), 0)
    recording = record_lightning_step(module, "training_step", batch, logs=logs, outline=outline)
    assert logs.manual is not None
    notes = logs.manual
    results: Any = next(reversed(recording.graph.nodes)).args[0]
    wanted = range(1 + len(notes.losses), len(results))
    segments = cut_segments(recording, notes.acts, notes.frozen, wanted, {})
    leaves = recording.flatten((batch,), {})
    prove_segments(recording, segments, notes.acts, notes.frozen, leaves)
    return recording, segments, notes.acts, notes.frozen, leaves


def again(self, z):
    """The images get gradients from the second loss: they are made again, and their statistics are set back."""
    maker, judge = self.optimizers()
    fake = self.maker(z)
    self.manual_backward(F.softplus(self.judge(fake.detach())).mean())
    judge.step()
    self.manual_backward(F.softplus(-self.judge(fake)).mean())
    maker.step()


def carried(self, z):
    """The images are those of the old maker."""
    maker, judge = self.optimizers()
    self.toggle_optimizer(maker)
    fake = self.maker(z)
    self.manual_backward(F.softplus(-self.judge(fake)).mean())
    maker.step()
    self.untoggle_optimizer(maker)
    self.manual_backward(F.softplus(self.judge(fake.detach())).mean())
    judge.step()


def after(self, z):
    """A value of the updated networks."""
    maker, _ = self.optimizers()
    self.manual_backward(self.judge(self.maker(z)).mean())
    maker.step()
    self.log("after", self.judge(self.maker(z)).mean())


def test_values_with_gradients_are_computed_again_and_buffers_are_set_back() -> None:
    _, (first, second), *_ = cut(again)
    assert not first.takes and not second.takes
    assert all(name.startswith("judge") for name in first.trained)
    assert {name.partition(".")[0] for name in second.trained} == {"maker", "judge"}
    assert first.restored == () and set(second.restored) == {
        "maker.1.running_mean", "maker.1.running_var", "maker.1.num_batches_tracked",
    }  # fmt: skip


def test_values_of_old_parameters_are_carried_and_toggled_parameters_are_not_trained() -> None:
    _, (first, second), *_ = cut(carried)
    assert all(name.startswith("maker") for name in first.trained)
    assert all(name.startswith("judge") for name in second.trained)
    assert len(second.takes) == 1 and second.takes[0] in first.makes
    assert second.recording.inputs[-1].shape == (6, 6)
    ops = [node.target for node in second.recording.graph.nodes if node.op == "call_module"]
    assert ops == ["judge.0", "judge.1", "judge.2"], "the maker is not run again"


def test_values_after_the_last_backward_are_a_segment_without_a_loss() -> None:
    _, segments, acts, *_ = cut(after)
    assert [segment.has_loss for segment in segments] == [True, False]
    assert segments[-1].moment == len(acts)


def test_a_wrong_segment_is_found() -> None:
    recording, segments, acts, frozen, leaves = cut(carried)
    for part, target, words in [(0, "maker.3", "output|gradient"), (1, "judge.1", "output|gradient")]:
        nodes = {str(node.target): node for node in segments[part].recording.graph.nodes}
        node = nodes[target]
        before, node.args = node.args, (nodes["maker.2" if part == 0 else "judge.0"],)
        with node.graph.inserting_before(node):
            doubled = node.graph.call_function(torch.mul, (node.args[0], 2.0))
        doubled.meta = dict(node.args[0].meta)
        node.args = (doubled,)
        with pytest.raises(CaptureError, match=words):
            prove_segments(recording, segments, acts, frozen, leaves)
        node.args = before
        node.graph.erase_node(doubled)
    prove_segments(recording, segments, acts, frozen, leaves)


def test_a_segment_that_changes_buffers_twice_is_found() -> None:
    recording, (first, second), acts, frozen, leaves = cut(again)
    with pytest.raises(CaptureError, match="buffer maker"):
        prove_segments(recording, (first, dataclasses.replace(second, restored=())), acts, frozen, leaves)
