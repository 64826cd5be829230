"""Backward in two halves gives the gradients of the ordinary backward, and really leaves the weights for later."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from pipepart.machine import usable
from pipepart.recording import record
from pipepart.runtime.deferred import _Deferred, defer_weights, deferring

LAYERS = {
    "linear": (nn.Linear(5, 7), torch.randn(4, 3, 5)),
    "linear without bias": (nn.Linear(5, 7, bias=False), torch.randn(4, 5)),
    "conv1d": (nn.Conv1d(3, 4, 3, stride=2, padding=1), torch.randn(2, 3, 9)),
    "conv2d": (nn.Conv2d(4, 6, 3, padding=1, dilation=2, groups=2), torch.randn(2, 4, 8, 8)),
    "conv2d of one image": (nn.Conv2d(3, 2, 3), torch.randn(3, 8, 8)),
    "conv3d": (nn.Conv3d(2, 3, 2, bias=False), torch.randn(2, 2, 4, 4, 4)),
    "embedding": (nn.Embedding(9, 4, padding_idx=2), torch.randint(0, 9, (3, 5))),
}


class _Around(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sin().sum()


def _graph(layer: nn.Module, x: torch.Tensor) -> tuple[nn.Module, fx.GraphModule]:
    model = _Around(layer)
    return model, record(model, (x,)).graph_module()


@pytest.mark.parametrize("name", LAYERS)
def test_two_halves_equal_the_whole(name: str) -> None:
    layer, x = LAYERS[name]
    x = x.clone().requires_grad_(x.is_floating_point())
    model, graph = _graph(layer, x.detach())
    model(x).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    at_input = None if x.grad is None else x.grad.clone()
    model.zero_grad()
    x.grad = None
    assert defer_weights(graph) == 1
    loss = graph(x)[0]
    with deferring() as work:
        loss.backward()
    assert len(work) == 1
    assert all(p.grad is None for p in model.parameters()), "the weights were not left for later"
    if at_input is not None:
        torch.testing.assert_close(x.grad, at_input)
    for piece in work:
        piece()
    for parameter, gradient in zip(model.parameters(), expected):
        torch.testing.assert_close(parameter.grad, gradient)
    loss = graph(x)[0]
    loss.backward()  # with no queue open: all at once, added to what is there
    for parameter, gradient in zip(model.parameters(), expected):
        torch.testing.assert_close(parameter.grad, 2 * gradient)


def test_hooks_of_parameters_change_their_gradients() -> None:
    layer, x = nn.Linear(5, 7), torch.ones(4, 5)
    model, graph = _graph(layer, x)
    layer.weight.register_hook(lambda gradient: 3 * gradient)
    model(x).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    assert defer_weights(graph) == 1
    with deferring() as work:
        graph(x)[0].backward()
    for piece in work:
        piece()
    for parameter, gradient in zip(model.parameters(), expected):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.skipif(not usable("bfloat16"), reason="this processor has no products of this dtype")
@pytest.mark.parametrize("name", LAYERS)
def test_two_halves_under_autocast_equal_the_layer_under_autocast(name: str) -> None:
    layer, x = LAYERS[name]
    x = x.clone().requires_grad_(x.is_floating_point())
    layer.zero_grad()

    def autocast() -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16)

    with autocast():
        out = layer(x)
    out.float().sin().sum().backward()
    expected, at_input = [p.grad.clone() for p in layer.parameters()], x.grad
    layer.zero_grad()
    x.grad = None
    with autocast():
        _, graph = _graph(layer, x.detach())
        assert defer_weights(graph) == 1
        (deferred,) = [value for value in vars(graph).values() if isinstance(value, _Deferred)]
        halves = deferred(x)
    assert halves.dtype == out.dtype
    assert torch.equal(halves, out)
    with deferring() as work:
        halves.float().sin().sum().backward()
    assert len(work) == 1, "the weights were not left for later"
    assert all(p.grad is None for p in layer.parameters())
    assert (x.grad is None) == (at_input is None)
    if at_input is not None:
        assert x.grad.dtype == x.dtype
        assert torch.equal(x.grad, at_input)
    for piece in work:
        piece()
    for parameter, gradient in zip(layer.parameters(), expected):
        assert parameter.grad.dtype == parameter.dtype
        torch.testing.assert_close(parameter.grad, gradient, rtol=2**-7, atol=2**-7)
    with autocast():
        deferred(x).float().sin().sum().backward()  # with no queue open
    for parameter, gradient in zip(layer.parameters(), expected):
        torch.testing.assert_close(parameter.grad, 2 * gradient, rtol=2**-7, atol=2**-6)


def test_a_deferred_layer_leaves_no_copy_of_its_weight_for_other_ops() -> None:
    layer, x = nn.Linear(5, 5), torch.randn(2, 5)
    _, graph = _graph(layer, x)
    defer_weights(graph)
    with torch.autocast("cpu", torch.bfloat16):
        graph(x)
        plain = nn.functional.linear(x, layer.weight)
    plain.float().sum().backward()
    assert layer.weight.grad is not None


def test_double_precision_is_kept_under_autocast() -> None:
    layer, x = nn.Linear(5, 5).double(), torch.randn(2, 5, dtype=torch.float64)
    _, graph = _graph(layer, x)
    assert defer_weights(graph) == 1
    with torch.autocast("cpu", torch.bfloat16), deferring() as work:
        loss = graph(x)[0]
        loss.backward()
    assert loss.dtype == torch.float64
    assert len(work) == 1


@pytest.mark.parametrize("change", ["hook", "sparse", "max_norm", "padding_mode", "frozen"])
def test_layers_with_something_special_keep_their_own_backward(change: str) -> None:
    layer: nn.Module
    x: torch.Tensor = torch.randint(0, 9, (3, 5))
    if change == "hook":
        layer, x = nn.Linear(5, 5), torch.randn(2, 5)
        layer.register_full_backward_hook(lambda *args: None)
    elif change == "padding_mode":
        layer, x = nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), torch.randn(1, 2, 6, 6)
    elif change == "frozen":
        layer, x = nn.Linear(5, 5).requires_grad_(False), torch.randn(2, 5)
    else:
        layer = nn.Embedding(9, 4, **{change: True if change == "sparse" else 1.0})
    model = nn.ModuleDict({"layer": layer})
    graph = fx.Graph()
    graph.output(graph.call_module("layer", (graph.placeholder("x"),)))
    module = fx.GraphModule(model, graph)
    module.__dict__["layer"] = layer
    found = defer_weights(module)
    if change == "frozen":
        assert found == 1
        assert not module.__dict__["layer"](x).requires_grad
    else:
        assert found == 0


def test_planning_prices_the_layers_that_are_deferred() -> None:
    from pipepart.cost.op_costs import SPLIT_LAYERS
    from pipepart.runtime import deferred

    assert set(deferred._FUNCTIONS) == set(SPLIT_LAYERS)
