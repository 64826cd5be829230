"""Code that something has wrapped: compiled functions and modules, scripted ones, custom ops of ``torch.library``."""

import pytest
import torch
import torch.nn as nn

from pipepart.recording import record
from tools.bench.zoo.checks import check_model


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x).relu()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def middle(self, x):
        return x

    def forward(self, x):
        return self.last(self.middle(self.first(x).relu())).pow(2).mean()


def example(batch, length=6):
    return (torch.randn(batch, length, 8),)


@torch.compile(backend="eager")
def spread(x, y):
    return (x - y).pow(2).mean(-1, keepdim=True) + x * x.shape[0]


class CompiledFunction(Net):
    def middle(self, x):
        return spread(x, x.mean(1, keepdim=True))


class CompiledMethod(Net):
    @torch.compile(backend="eager")
    def middle(self, x):
        return x * x.shape[1]


class CompiledModule(Net):
    def __init__(self):
        super().__init__()
        self.block = torch.compile(Block(), backend="eager")

    def middle(self, x):
        return self.block(x)


class CompiledInPlace(Net):
    def __init__(self):
        super().__init__()
        self.block = Block()
        self.block.compile(backend="eager")

    def middle(self, x):
        return self.block(x)


class CompiledLeaf(Net):
    def __init__(self):
        super().__init__()
        self.block = nn.Linear(8, 8)
        self.block.compile(backend="eager")

    def middle(self, x):
        return self.block(x)


def compiled_root():
    model = Net()
    model.compile(backend="eager")
    return model


COMPILED = [CompiledFunction, CompiledMethod, CompiledModule, CompiledInPlace, CompiledLeaf, compiled_root]


@pytest.mark.parametrize("build", [*COMPILED, lambda: torch.compile(Net(), backend="eager")])
def test_compiled_code_is_recorded_as_what_it_wraps(build):
    model = build()
    for _ in range(2):
        report = check_model("compiled", model, example, batch=4)
        assert report.captured, report.problems
        assert report.equal, report.problems


def test_the_ops_of_compiled_code_are_ops_of_their_own():
    names = [node.name for node in record(CompiledFunction(), example(4)).ops]
    assert {"sub", "pow_1", "mul"} <= set(names)
    recording = record(CompiledModule(), example(4))
    assert [n.target for n in recording.ops if n.op == "call_module"] == ["first", "block._orig_mod.inner", "last"]


@torch.library.custom_op("pipepart_tests::sine_squared", mutates_args=())
def sine_squared(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x.sin() ** 2 * scale


def _keep(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.scale = inputs[1]


def _backward(ctx, gradient):
    (x,) = ctx.saved_tensors
    return gradient * 2 * x.sin() * x.cos() * ctx.scale, None


sine_squared.register_autograd(_backward, setup_context=_keep)
sine_squared.register_fake(lambda x, scale: torch.empty_like(x))


class CustomOp(Net):
    def middle(self, x):
        namespace = torch.ops.pipepart_tests
        return sine_squared(x, 2.0) + namespace.sine_squared(x, 1.0) + namespace.sine_squared.default(x, 0.5)


class AtenOps(Net):
    def middle(self, x):
        y = torch.ops.aten.view.default(x, [x.shape[0], -1, 8])
        return torch.ops.aten.silu(y) + torch.ops.aten.mul.Tensor(y, y)


@torch.jit.script
def scripted_scale(x, n: int):
    return x * n + 1


class Scripted(Net):
    def __init__(self):
        super().__init__()
        self.block = torch.jit.script(Block())
        self.traced = torch.jit.trace(Block(), torch.randn(2, 6, 8))

    def middle(self, x):
        return self.traced(self.block(scripted_scale(x, x.shape[1])))


class Jagged(Net):
    """A nested tensor of rows of one length; the first use of such tensors sets something up."""

    def middle(self, x):
        offsets = torch.arange(0, x.shape[0] * x.shape[1] + 1, x.shape[1])
        nested = torch.nested.nested_tensor_from_jagged(x.reshape(-1, 8), offsets)
        return (nested.sin() * nested).to_padded_tensor(0.0)


class SortedBack(Net):
    """Rows are sorted, worked on, and put back by an index that is made of memory that nothing has written."""

    def middle(self, x):
        rows = x.reshape(-1, 8)
        order = rows[:, 0].argsort()
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return rows[order].mul(2)[back].view_as(x)


@pytest.mark.parametrize("build", [CustomOp, AtenOps, Scripted, Jagged, SortedBack])
def test_equal_to_eager(build):
    model = build()
    for _ in range(2):
        report = check_model(build.__name__, model, example, batch=4)
        assert report.captured, report.problems
        assert report.equal, report.problems


def test_a_custom_op_is_one_op():
    calls = [str(n.target) for n in record(CustomOp(), example(4)).ops if n.op == "call_function"]
    assert [call for call in calls if "sine_squared" in call] == [
        "pipepart_tests.sine_squared.default",
        "pipepart_tests.sine_squared",
        "pipepart_tests.sine_squared.default",
    ]
    assert len([n for n in record(AtenOps(), example(4)).ops if "aten" in str(n.target)]) == 3
