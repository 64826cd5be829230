"""Context managers around ops: kept for the ops inside, or refused by name."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from pipepart.errors import CaptureError
from pipepart.recording import record
from pipepart.recording.recorded_run.contexts import switches
from tools.bench.zoo.checks import check_model


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.middle(self.first(x).relu())).pow(2).mean()


class MathAttention(Net):
    def middle(self, x):
        q = x.view(x.shape[0], -1, 2, 4).transpose(1, 2)
        with sdpa_kernel(SDPBackend.MATH):
            x = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
        return x + F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)


class DefaultType(Net):
    def middle(self, x):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        steps = torch.linspace(0, 1, x.shape[1])
        torch.set_default_dtype(before)
        return (x.double() + steps.view(-1, 1)).to(x.dtype)


class OnDevice(Net):
    def middle(self, x):
        with torch.device("cpu"):
            ones = torch.ones(x.shape[0], 1, 1)
        with torch.autograd.graph.save_on_cpu():
            return ones * x.sin()


def example(batch, length=6):
    return (torch.randn(batch, length, 8),)


@pytest.mark.parametrize("kind", [MathAttention, DefaultType, OnDevice])
def test_equal_to_eager_and_nothing_stays_switched(kind):
    before = switches()
    report = check_model(kind.__name__, kind(), example, batch=4)
    assert report.captured, report.problems
    assert report.equal, report.problems
    assert switches() == before


def test_the_attention_inside_runs_with_the_kernel_that_was_chosen(monkeypatch):
    module = record(MathAttention(), example(4)).module()
    seen = []
    attention = torch._C._nn.scaled_dot_product_attention

    def watched(*args, **kwargs):
        seen.append((torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()))
        return attention(*args, **kwargs)

    monkeypatch.setattr(torch._C._nn, "scaled_dot_product_attention", watched)
    module(*example(4))
    assert seen == [(False, True), (True, True)]


def test_an_error_inside_leaves_nothing_switched():
    class Fails(Net):
        def middle(self, x):
            with sdpa_kernel(SDPBackend.MATH):
                return F.scaled_dot_product_attention(x, x, x[..., :4].repeat(1, 1, 2)) * limit(x)

    allowed = [True]

    def limit(x):
        return checked(x, allowed)

    recording, before = record(Fails(), example(4)), switches()
    allowed[0] = False
    with pytest.raises(ValueError, match="not allowed"):
        recording.module()(*example(4))
    assert switches() == before


class Checked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, allowed):
        if not allowed[0]:
            raise ValueError("not allowed")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def checked(x, allowed):
    return Checked.apply(x, Flag(allowed))


class Flag:
    def __init__(self, values):
        self.values = values

    def __getitem__(self, index):
        return self.values[index]


class SavedHooks(Net):
    def middle(self, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
            return x * x.sin()


class Seeds(Net):
    def middle(self, x):
        torch.manual_seed(3)
        return x + torch.randn(x.shape[1], 1)


@pytest.mark.parametrize(("kind", "text"), [(SavedHooks, "hooks on saved tensors"), (Seeds, "seeds nothing")])
def test_what_cannot_be_kept_is_refused_by_name(kind, text):
    seed, enter = torch.manual_seed, torch.autograd.graph.saved_tensors_hooks.__enter__
    with pytest.raises(CaptureError, match=text):
        record(kind(), example(4))
    assert torch.manual_seed is seed and torch.autograd.graph.saved_tensors_hooks.__enter__ is enter
