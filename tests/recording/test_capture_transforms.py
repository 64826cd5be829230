"""``torch.func``: each call of a transformed function is one op over its arguments and all that it finds around it."""

import functools

import pytest
import torch
import torch.nn as nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

from pipepart.errors import CaptureError
from pipepart.recording import record
from tools.bench.zoo.checks import check_model


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.weights = nn.Parameter(torch.randn(3, 8, 8) * 0.3)

    def forward(self, x):
        return self.last(self.middle(self.first(x).relu())).pow(2).mean()


def example(batch, length=6):
    return (torch.randn(batch, length, 8),)


MODELS = {
    "vmap": lambda net, x: vmap(lambda row: row * row.sum())(x),
    "vmap over parameters": lambda net, x: vmap(lambda w, x: x @ w, in_dims=(0, None))(net.weights, x).mean(0),
    "vmap that uses a layer": lambda net, x: vmap(lambda row: net.inner(row).tanh())(x),
    "grad": lambda net, x: x + grad(lambda y: (y**3).sum())(x),
    "grad through a layer": lambda net, x: grad(lambda y: net.inner(y).tanh().sum())(x),
    "grad and value": lambda net, x: torch.mul(*grad_and_value(lambda y: (y**2).sum())(x)),
    "jvp": lambda net, x: jvp(lambda y: y.sin(), (x,), (x * 2,))[1],
    "vjp": lambda net, x: vjp(lambda y: net.inner(y).tanh(), x)[1](x * 2)[0],
    "vjp value": lambda net, x: vjp(lambda y: net.inner(y).tanh(), x)[0],
    "jacrev": lambda net, x: x + vmap(jacrev(lambda y: (y**2).sum(-1)))(x).sum(1),
    "jacfwd": lambda net, x: jacfwd(lambda y: (y**2).sum((0, 1)))(x).sum(0),
    "hessian": lambda net, x: x * hessian(lambda y: (y**3).sum())(x.mean((0, 1))).sum(),
    "functional call": lambda net, x: functional_call(
        net.inner, {name: p * 2 for name, p in net.inner.named_parameters()}, (x,)
    ),
    "functional call of a part": lambda net, x: functional_call(net.inner, {"bias": net.inner.bias + 1}, (x,)),
}


def around_tensor(net, x):
    mean, half = x.mean(), functools.partial(torch.mul, x.std())
    return vmap(lambda row: half(row - mean))(x)


def around_size(net, x):
    n = x.shape[0]
    return vmap(lambda row, scale=x.shape[1]: row / n + scale)(x)


def around_nested(net, x):
    mean = x.mean()

    def inside(row):
        return row - mean

    return vmap(lambda row: inside(row) * 2)(x)


MODELS |= {"tensor around": around_tensor, "size around": around_size, "function around": around_nested}


@pytest.mark.parametrize("name", MODELS)
def test_equal_to_eager(name):
    model = Net()
    model.middle = functools.partial(MODELS[name], model)
    for _ in range(2):
        report = check_model(name, model, example, batch=4)
        assert report.captured, report.problems
        assert report.equal, report.problems
    if name != "hessian":
        assert record(model, example(4)).inputs[0].dynamic[:2] == (True, True)


def test_a_transformed_call_is_one_op_that_names_the_parameters_it_uses():
    model = Net()
    model.middle = functools.partial(MODELS["vmap that uses a layer"], model)
    (op,) = [node for node in record(model, example(4)).ops if str(node.target).find("vmap") >= 0]
    assert op.target.__name__ == "vmap_lambda"
    assert [source.target for source in op.kwargs["uses"]] == ["inner.weight", "inner.bias"]


def test_vjp_of_random_numbers_is_refused():
    model = Net()
    model.middle = lambda x: vjp(lambda y: y * torch.rand_like(y), x)[1](x)[0]
    with pytest.raises(CaptureError, match=r"torch\.func\.vjp of a function that draws random numbers"):
        record(model, example(4))


def test_a_tensor_in_an_attribute_is_refused_by_shape_and_line():
    class Keeps(Net):
        def middle(self, x):
            self.kept = x.mean(0)
            return vmap(lambda row: row - self.kept)(x)

    with pytest.raises(CaptureError, match="not among its arguments"):
        record(Keeps(), example(4))
