"""Gradients of floating inputs that require none: compared in a second pair of runs."""

import contextlib
import io
import re

import pytest
import torch
import torch.nn.functional as F
from support.mixers import MIXERS, PLAIN
from support.ranks import run_ranks
from torch import nn

from pipepart.errors import CaptureError
from pipepart.recording import prove, record


class Thrice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


class Inputs(nn.Module):
    """Ops on the inputs before anything that is trained: their gradients reach no parameter."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6).double()

    def forward(self, x, y, ids):
        x = Thrice.apply(x) * 2
        with torch.no_grad():
            middle = y.mean(1, keepdim=True)
        y = y - middle
        y.mul_(0.5)
        return F.mse_loss(self.layer(x)[ids], y.detach() + y * 3)


class Checkpointed(nn.Module):
    """Both kinds of checkpointing; the reentrant one gives gradients by way of `.grad` only."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = torch.utils.checkpoint.checkpoint(lambda h, f=layer: f(h).tanh(), x, use_reentrant=bool(i % 2))
        return x.square().mean()


def _example(size=4):
    torch.manual_seed(0)
    return torch.randn(size, 6).double(), torch.randn(size, 6).double(), torch.arange(size)


def _inserted(recording, name, target, method=False):
    graph = recording.graph
    source = next(node for node in graph.nodes if node.name == name)
    user = next(iter(source.users))
    with graph.inserting_before(user):
        made = graph.call_method(target, (source,)) if method else graph.call_function(target, (source,))
    made.meta = dict(user.meta)
    made.meta["origin"] = made.name
    user.replace_input_with(source, made)


def test_inputs_are_proved():
    for model, args in (
        (Inputs(), _example()),
        (Checkpointed(), (torch.randn(4, 6),)),
        (nn.Sequential(nn.Conv1d(2, 3, 3), nn.ReLU()), (torch.randn(4, 2, 9),)),
    ):
        recording = record(model, args)
        assert not [note for note in recording.notes if note.startswith("gradients of inputs")]
        assert prove(recording, model, args) == ()
        assert all(parameter.grad is None for parameter in model.parameters())
        assert not any(tensor.requires_grad for tensor in args)


@pytest.mark.parametrize(
    ("target", "method"), [("detach", True), (Thrice.apply, False)], ids=["detached", "scaled gradient"]
)
def test_a_gradient_that_reaches_no_parameter(target, method):
    """No parameter sees it."""
    model, args = Inputs(), _example()
    recording = record(model, args)
    assert prove(recording, model, args) == ()
    _inserted(recording, "x", target, method)
    with pytest.raises(CaptureError, match="does not give the gradients of the model: gradient of input x") as caught:
        prove(recording, model, args)
    assert "where: " in str(caught.value)


def test_what_is_not_proved_is_a_note():
    class Decides(nn.Linear):
        def forward(self, x):
            return super().forward(x * 2 if x.requires_grad else x)

    class Refuses(nn.Linear):
        def forward(self, x):
            if x.requires_grad:
                raise ValueError("no gradients here")
            return super().forward(x)

    x = torch.randn(4, 3)
    for kind, words in (
        (Decides, "the model gives other results if inputs require one"),
        (Refuses, r"the model refuses inputs that require one \(ValueError: no gradients here\)"),
    ):
        (note,) = (note for note in record(kind(3, 3), (x,)).notes if note.startswith("gradients"))
        assert re.fullmatch(f"gradients of inputs: not proved, since {words}", note)


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(x * 2 if x.requires_grad else x).square().mean()


def _verified():
    from pipepart import Pipeline

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        Pipeline(Loss(), (torch.randn(8, 6),), microbatches=2, verify=True)
    return said.getvalue()


def test_verify_tells_it():
    (said,) = run_ranks(1, _verified)
    assert "verify     one process" in said
    assert "note       gradients of inputs: not proved" in said


@pytest.mark.parametrize("name", [*MIXERS, *PLAIN])
def test_models(name):
    """None is refused for the gradients of its inputs."""
    torch.manual_seed(0)
    model = {**MIXERS, **PLAIN}[name]().train()
    recording = record(model, tuple(model.batch(4)))
    assert not [note for note in recording.notes if note.startswith("gradients of inputs")]
