"""Custom autograd functions are one op each, whatever way their ``apply`` comes to the model."""

import functools

import pytest
import torch
from torch import nn

from pipepart.recording import record


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight=1.0):
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.weight * gradient, None


class Heir(Reversal):
    pass


class HeirOfHeir(Heir):
    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient, None


class WithSetup(torch.autograd.Function):
    @staticmethod
    def forward(x, weight=2.0):
        return x * 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.weight = inputs[1]

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.weight * gradient, None


class OwnApply(Reversal):
    @classmethod
    def apply(cls, x, weight=3.0):
        return super().apply(x, weight * 2)


class TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone(), x * 2

    @staticmethod
    def backward(ctx, first, second):
        return first * 5 - second


reverse = Reversal.apply
TABLE = {"reverse": [Heir.apply]}


def closed_over():
    function = HeirOfHeir.apply
    return lambda x: function(x, 0.5)


WAYS = {
    "class": lambda x: Reversal.apply(x, 0.5),
    "name in a file": reverse,
    "table": TABLE["reverse"][0],
    "partial": functools.partial(reverse),
    "closure": closed_over(),
    "setup_context": WithSetup.apply,
    "setup_context, by keyword": functools.partial(WithSetup.apply, weight=0.25),
    "apply of its own": OwnApply.apply,
    "two outputs": lambda x, apply=TwoOutputs.apply: sum(apply(x)),
}


class Model(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 1)
        self.way = way

    def forward(self, x):
        return self.after(self.way(self.before(x).tanh())).square().mean()


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_calling_a_function_is_recorded(way):
    model, x = Model(WAYS[way]).double(), torch.randn(3, 4, dtype=torch.float64)
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    recording = record(model, (x,))
    got = torch.autograd.grad(recording.module()(x), list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(expected, got))
    assert sum(node.name.endswith("_apply") for node in recording.ops) == 1
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)


def test_a_custom_op_of_a_library_keeps_its_gradient():
    @torch.library.custom_op("pipepart_tests::thrice", mutates_args=())
    def thrice(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    thrice.register_fake(lambda x: torch.empty_like(x))
    thrice.register_autograd(lambda ctx, gradient: gradient * 7)
    model, x = Model(thrice).double(), torch.randn(3, 4, dtype=torch.float64)
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    got = torch.autograd.grad(record(model, (x,)).module()(x), list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(expected, got))
