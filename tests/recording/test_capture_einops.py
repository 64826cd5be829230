"""einops: each function and layer is one readable op with dynamic sizes, recorded as often as one likes."""

import einops
import pytest
import torch
import torch.nn as nn
from einops import einsum, pack, rearrange, reduce, repeat, unpack
from einops.layers.torch import EinMix, Rearrange, Reduce

from pipepart.graph import capture
from pipepart.recording import record
from tools.bench.zoo.checks import check_model


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        q = rearrange(self.first(x), "b n (h d) -> b h n d", h=2)
        k = repeat(q, "b h n d -> b h (n r) d", r=2)
        weights = einsum(q, k, "b h i d, b h j d -> b h i j").softmax(-1)
        out = einsum(weights, k, "b h i j, b h j d -> b h i d")
        out = out + reduce(out, "b h n d -> b h 1 d", "mean")
        out = rearrange(out, "b h n d -> b n (h d)")
        both, shapes = pack([out, out[:, 0]], "b * d")
        tokens, first = unpack(both, shapes, "b * d")
        return self.last(tokens + first[:, None]).pow(2).mean()


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = Rearrange("b n (h d) -> b h n d", h=2)
        self.flat = Rearrange("b h n d -> b n (h d)")
        self.most = Reduce("b n d -> b 1 d", "max")
        self.mix = EinMix("b n d -> b n e", weight_shape="d e", bias_shape="e", d=8, e=8)
        self.last = nn.Linear(8, 8)

    def forward(self, x):
        x = self.flat(self.heads(x))
        return self.last(self.mix(x) + self.most(x)).pow(2).mean()


class Sizes(nn.Module):
    """Sizes of tensors as lengths of axes, by the name of the package, and a list of tensors."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x):
        y = einops.repeat(self.first(x).mean(1), "b d -> b n d", n=x.shape[1])
        flat = einops.rearrange(x + y, "b n d -> (b n) d")
        back = einops.rearrange(flat, "(b n) d -> b n d", b=len(x))
        length = einops.parse_shape(back, "b n _")["n"]
        return einops.rearrange([back, back * length], "two b n d -> b (two n) d").pow(2).mean()


def example(batch, length=6):
    return (torch.randn(batch, length, 8),)


@pytest.mark.parametrize("kind", [Attention, Layers, Sizes])
def test_equal_recorded_again_and_at_other_sizes(kind):
    model = kind()
    for batch in (4, 2, 4):
        report = check_model(kind.__name__, model, example, batch=batch)
        assert report.captured, report.problems
        assert report.equal, report.problems
    recording = record(model, example(4))
    assert recording.inputs[0].dynamic[:2] == (True, True)
    for batch, length in ((2, 6), (5, 3)):
        args = example(batch, length)
        torch.testing.assert_close(recording.module()(*args), model(*args))


def test_another_model_in_the_same_process():
    first, second = Attention(), Attention()
    for model in (first, second, first):
        args = example(4)
        torch.testing.assert_close(capture(model, args).module(*args), model(*args))


def test_each_function_is_one_op():
    ops = [node for node in record(Attention(), example(4)).ops if node.op == "call_function"]
    names = [node.target.__name__ for node in ops if node.target.__module__.startswith("einops.")]
    assert names == [
        "rearrange",
        "repeat",
        "einsum",
        "einsum",
        "reduce",
        "rearrange",
        "pack",
        "unpack",
    ]
    assert ops[0].args[1] == "b n (h d) -> b h n d" and ops[0].kwargs == {"h": 2}


def test_each_layer_is_one_op():
    recording = record(Layers(), example(4))
    assert [node.target for node in recording.ops if node.op == "call_module"] == [
        "heads",
        "flat",
        "mix",
        "most",
        "last",
    ]


def test_an_error_of_einops_is_the_users():
    class Wrong(nn.Module):
        def forward(self, x):
            return rearrange(x, "b (n three) d -> b n d three", three=4)

    with pytest.raises(einops.EinopsError, match="can't divide axis"):
        record(Wrong(), example(4))


def test_nothing_is_left_patched():
    before = rearrange
    record(Attention(), example(4))
    assert rearrange is before is einops.rearrange
