"""Parameters of other stages: their form is there, and each use of their values is an error that names them."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pipepart.errors import ForeignTensorError
from pipepart.runtime.foreign import ForeignTensor, Place, become, fill_in

PLACE = Place("encoder.0.weight", "parameter", 1, 3)


def foreign(*shape: int, stage: int = 1, **options: Any) -> nn.Parameter:
    parameter = nn.Parameter(torch.randn(*(shape or (3, 4)), **options))
    become(parameter, replace(PLACE, stage=stage, rank=stage + 2))
    return parameter


HERE = torch.ones(3, 4)

USES: dict[str, Callable[[nn.Parameter], Any]] = {
    "add_ to a tensor of this rank": lambda p: HERE.clone().add_(p, alpha=0.1),
    "lerp_": lambda p: HERE.clone().lerp_(p, 0.1),
    "copy_ from": lambda p: HERE.clone().copy_(p),
    "copy_ into": lambda p: p.copy_(HERE),
    "copy_ into data": lambda p: p.data.copy_(HERE),
    "mul_ by a tensor of this rank": lambda p: p.mul_(HERE),
    "add_ of one of another rank": lambda p: p.detach().add_(foreign(stage=2)),
    "set data of one of another rank": lambda p: setattr(p, "data", foreign(stage=2)),
    "a number of it": lambda p: bool((p > 0)[0, 0]),
    "random numbers": lambda p: p.data.normal_(),
    "more random numbers": lambda p: p.data.bernoulli_(),
    "set data": lambda p: setattr(p, "data", HERE),
    "set grad": lambda p: setattr(p, "grad", HERE),
    "sum": lambda p: p.sum(),
    "norm": lambda p: p.norm(),
    "item": lambda p: foreign(1).item(),
    "float": lambda p: float(foreign(1).data),
    "add_ of a clone": lambda p: HERE.clone().add_(p.clone()),
    "to": lambda p: p.to("cpu"),
    "cpu": lambda p: p.cpu(),
    "double": lambda p: p.double(),
    "numpy": lambda p: p.numpy(),
    "numpy of detach": lambda p: p.detach().numpy(),
    "numpy force": lambda p: p.numpy(force=True),
    "array": lambda p: np.asarray(p.data),
    "tolist": lambda p: p.tolist(),
    "data_ptr": lambda p: p.data_ptr(),
    "storage": lambda p: p.untyped_storage(),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
    "equal": lambda p: torch.equal(p, p),
    "in a list": lambda p: p in [HERE, p],
    "index": lambda p: p[0],
    "set index": lambda p: p.data.__setitem__(0, 1.0),
    "iterate": lambda p: list(p),
    "foreach into": lambda p: torch._foreach_add_([HERE.clone(), p], 1.0),
    "foreach from": lambda p: torch._foreach_lerp_([HERE.clone()], [p], 0.1),
    "foreach copy": lambda p: torch._foreach_copy_([HERE.clone()], [p.data]),
    "fused optimizer step": lambda p: torch._fused_sgd_(
        [p], [HERE], [], weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0, nesterov=False, maximize=False,
        is_first_step=True,
    ),
    "operator by name": lambda p: torch.ops.aten.add.Tensor(HERE, p),
    "linear": lambda p: nn.functional.linear(HERE, p),
    "stack": lambda p: torch.stack([HERE, p]),
    "cat, deep in a list": lambda p: torch.cat([HERE, HERE, p]),
    "index_put": lambda p: HERE.clone().index_put_((torch.tensor([0]),), p.data),
    "out=": lambda p: torch.add(HERE, HERE, out=p.data),
    "init": lambda p: nn.init.kaiming_uniform_(p),
    "vector": lambda p: nn.utils.parameters_to_vector([nn.Parameter(HERE), p]),
    "from a vector": lambda p: nn.utils.vector_to_parameters(torch.ones(12), [p]),
    "pickle": lambda p: pickle.dumps(p),
    "save": lambda p: torch.save({"state": p.detach()}, io.BytesIO()),
    "share": lambda p: p.share_memory_(),
    "zeros like it": lambda p: HERE.clone().add_(torch.zeros_like(p)),
}  # fmt: skip


@pytest.mark.parametrize("use", USES, ids=list(USES))
@pytest.mark.parametrize("grad", [True, False])
def test_each_use_of_values_names_the_tensor(use: str, grad: bool) -> None:
    if grad and use in ("copy_ into", "mul_ by a tensor of this rank", "foreach into"):
        return  # autograd itself refuses to change a leaf
    parameter = foreign()
    with (
        torch.set_grad_enabled(grad),
        pytest.raises(ForeignTensorError, match=r"'encoder.0.weight' lives on stage 1 \(rank 3\)"),
    ):
        USES[use](parameter)


def test_a_plain_meta_tensor_would_say_nothing() -> None:
    """The reason for all this. If torch raises here one day, it is no longer needed."""
    assert torch.equal(HERE.clone().add_(torch.empty(3, 4, device="meta")), HERE)


def test_norm_of_all_gradients() -> None:
    with pytest.raises(ForeignTensorError, match=r"encoder.0.weight.*whole_parameters\(gradients=True\)"):
        nn.utils.clip_grad_norm_([nn.Parameter(HERE), foreign()], 1.0)


@torch.no_grad()
def test_arithmetic_within_the_other_stage_is_left_to_it() -> None:
    """All ranks run the same code. The results are foreign as well, so their values cannot be used here either."""
    target, online = foreign(), foreign()
    target.mul_(0.9).add_(online, alpha=0.1)
    target.lerp_(online, 0.1)
    target.data = 0.9 * target.data + 0.1 * online.data
    target.copy_(online)
    target.data.copy_(0.9 * target.data + 0.1 * online.data)
    assert isinstance(target, nn.Parameter) and isinstance(target + online, ForeignTensor)
    with pytest.raises(ForeignTensorError, match="add"):
        HERE + (target + online)
    with pytest.raises(RuntimeError):  # shapes are looked at as usual
        target.add_(foreign(5))


def test_modules_with_such_parameters_refuse_too() -> None:
    layer = nn.Linear(4, 3)
    become(layer.weight, PLACE)
    for use in (
        lambda: layer(HERE),
        lambda: layer.to(torch.float64),
        lambda: torch.save(layer.state_dict(), io.BytesIO()),
    ):
        with pytest.raises(ForeignTensorError, match=r"encoder\.0\.weight"):
            use()
    with pytest.raises(RuntimeError, match=r"encoder\.0\.weight"):  # torch collects the errors of all parameters
        layer.load_state_dict({"weight": torch.zeros(3, 4), "bias": torch.zeros(3)})
    assert list(layer.state_dict()) == ["weight", "bias"]


def test_the_form_is_known() -> None:
    parameter = foreign(2, 3, dtype=torch.float64)
    assert isinstance(parameter, nn.Parameter) and isinstance(parameter, ForeignTensor)
    assert (parameter.shape, parameter.dtype, parameter.numel(), parameter.ndim) == ((2, 3), torch.float64, 6, 2)
    assert parameter.is_meta and parameter.is_leaf and parameter.requires_grad and parameter.is_floating_point()
    assert parameter.element_size() == 8 and len(parameter) == 2 and parameter.size(1) == 3
    assert parameter.grad is None
    parameter.grad = None
    assert not parameter.requires_grad_(False).requires_grad
    assert "encoder.0.weight" in repr(parameter) and "stage 1" in f"{parameter!r}"
    assert parameter in {parameter} and hash(parameter) == hash(parameter)
    assert torch.empty_like(parameter, device="cpu").shape == (2, 3)
    copied = copy.deepcopy({"a": parameter, "b": parameter})
    assert copied["a"] is copied["b"] and copied["a"] is not parameter
    with pytest.raises(ForeignTensorError):
        copied["a"].sum()


def test_who_held_the_parameter_sees_it_become_foreign_and_whole() -> None:
    layer = nn.Linear(4, 3)
    mine, reference = [layer.weight], weakref.ref(layer.weight)
    layer.weight.mark = "no decay"
    graph = (layer.weight**2).sum()  # autograd refers to it as well
    become(layer.weight, PLACE)
    gc.collect()
    assert mine[0] is layer.weight is reference() and layer.weight.mark == "no decay"
    with pytest.raises(ForeignTensorError):
        mine[0].sum()
    graph.backward()
    fill_in(layer.weight, torch.ones(3, 4))
    assert mine[0] is layer.weight and type(layer.weight) is nn.Parameter and vars(layer.weight) == {"mark": "no decay"}
    assert float(mine[0].sum()) == 12.0
    layer(HERE).sum().backward()
    assert torch.equal(layer.weight.grad, 3 * HERE)
    assert pickle.loads(pickle.dumps(layer)).weight.sum() == 12.0


def test_recurrent_layers_keep_their_flat_list() -> None:
    layer = nn.LSTM(4, 4)
    values = [p.detach().clone() for p in layer.parameters()]
    expected = layer(HERE)[0]
    for parameter in layer.parameters():
        become(parameter, PLACE)
    for parameter, value in zip(layer.parameters(), values):
        fill_in(parameter, value)
    assert torch.equal(layer(HERE)[0], expected)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adamw in turn": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=list(OPTIMIZERS))
def test_optimizers_pass_over_them(kind: str) -> None:
    def steps(parameters: list[nn.Parameter], own: nn.Parameter) -> torch.Tensor:
        optimizer = OPTIMIZERS[kind](parameters)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for _ in range(3):
            own.grad = torch.full_like(own, 0.3)
            nn.utils.clip_grad_value_(parameters, 0.2)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        assert own.grad is None
        return own.detach()

    here, alone = nn.Parameter(HERE.clone()), nn.Parameter(HERE.clone())
    assert torch.equal(steps([foreign(), here, foreign(5)], here), steps([alone], alone))
    assert not torch.equal(here, HERE)


def test_the_scaler_passes_over_them() -> None:
    own = nn.Parameter(HERE.clone())
    optimizer, scaler = torch.optim.SGD([foreign(), own], lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(own.sum()).backward()
    scaler.unscale_(optimizer)
    assert torch.equal(own.grad, HERE)
    scaler.step(optimizer)
