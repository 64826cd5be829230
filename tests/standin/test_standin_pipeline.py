"""Pipelines on the stand-in device, with the rules of NCCL between its ranks: equal to one process, and without host waits.

Work on streams that is not ordered by an event raises an error on this device, so a case that passes has none.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import build
from support.ranks import run_standin
from support.reference import assert_close, reference_step

from pipepart.errors import PipepartError

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v")


def _waits_allowed(pipe: Any) -> int:
    """One wait per step at most on a stage: for the numbers of the batch on the first, or for the loss on the last."""
    placement = pipe.plan.placement
    return int(pipe.stage in (placement[0], placement[-1]))


def _compare(name: str, stages: int, replicas: int, schedule: str, recompute: bool) -> tuple[int, int, list[str]]:
    """Train two steps and compare the first one with plain PyTorch; return the actions and the waits of the second."""
    from support import standin

    from pipepart import Pipeline

    model, plain = build(name), build(name)
    batches = []
    for replica in range(replicas):
        torch.manual_seed(40 + replica)
        batches.append(plain.batch(7))
    losses = [reference_step(plain, batch, [2, 2, 2, 1]) for batch in batches]
    pipe = Pipeline(
        model, model.batch(8), stages=stages, replicas=replicas, microbatches=4, schedule=schedule, recompute=recompute,
        timeout=60,
    )  # fmt: skip
    mine = pipe._runtime.groups.replica
    loss = pipe.step(*batches[mine])
    assert loss.device.type == "standin"
    assert_close("loss", loss.cpu(), losses[mine])
    expected = dict(plain.named_parameters())
    for key, parameter in pipe.named_parameters():
        reference = expected[key].grad
        assert (parameter.grad is None) == (reference is None), key
        if reference is not None:
            assert parameter.grad.device.type == "standin"
            assert_close(key, parameter.grad.cpu(), reference / replicas)
    with standin.counting() as waits:
        pipe.step(*batches[mine])
    assert len(waits) <= _waits_allowed(pipe), waits
    assert not standin.races()
    return len(pipe.plan.make_schedule().actions[pipe.stage]), _waits_allowed(pipe), waits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stages", "replicas", "schedule", "recompute"),
    [
        *(("gpt", 2, 1, schedule, False) for schedule in SCHEDULES),
        ("gpt", 3, 1, "1f1b", True),
        ("unet", 3, 1, "interleaved", False),
        ("unet", 2, 1, "zb_v", True),
        ("resnet", 2, 1, "1f1b", False),
        ("frozen", 2, 1, "zb_h1", False),
        ("mixed", 3, 1, "1f1b", False),
        ("gpt", 2, 2, "1f1b", False),
        ("unet", 2, 2, "gpipe", False),
        ("gpt", 1, 2, "gpipe", False),
    ],
)
def test_a_step_is_equal_and_waits_at_most_once(
    name: str, stages: int, replicas: int, schedule: str, recompute: bool
) -> None:
    answers = run_standin(_compare, name, stages, replicas, schedule, recompute, ranks=stages * replicas)
    assert len(answers) == stages * replicas


def _steps_of_every_kind() -> None:
    """Other shapes, evaluation, accumulation, clipping, a state dict and another pipeline that loads it."""
    from support import standin

    from pipepart import Pipeline

    model, plain = build("gpt"), build("gpt")
    pipe = Pipeline(model, model.batch(8), stages=2, microbatches=4, schedule="1f1b", timeout=60)
    torch.manual_seed(3)
    for size, sizes in ((8, [2, 2, 2, 2]), (3, [1, 1, 1]), (7, [2, 2, 2, 1])):
        batch = model.batch(size)
        plain.zero_grad()
        for parameter in pipe.parameters():
            parameter.grad = None
        assert_close("loss", pipe.step(*batch).cpu(), reference_step(plain, batch, sizes))
        with torch.no_grad():
            assert_close("evaluation", pipe.evaluate(*batch).cpu(), plain.eval()(*batch))
        plain.train()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        assert_close("norm", pipe.clip_grad_norm_(0.1).cpu(), expected)
        gradients = dict(plain.named_parameters())
        for key, parameter in pipe.named_parameters():
            assert_close(key, parameter.grad.cpu(), gradients[key].grad)
    state = pipe.state_dict()
    if state:  # on rank 0
        assert all(value.device.type == "cpu" for value in state.values())
        for key, value in plain.state_dict().items():
            assert_close(key, state[key], value)
    assert not standin.races()


@pytest.mark.slow
def test_other_shapes_evaluation_clipping_and_states() -> None:
    run_standin(_steps_of_every_kind, ranks=2)


class Frozen(torch.nn.Module):
    """The last stage has nothing to clip."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.last.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x))).pow(2).mean()


def _clip_nothing() -> float:
    from pipepart import Pipeline

    torch.manual_seed(0)
    model, plain = Frozen().double(), Frozen().double()
    plain.load_state_dict(model.state_dict())
    batch = torch.randn(4, 4, dtype=torch.float64)
    pipe = Pipeline(model, (batch,), stages=2, microbatches=2, split_at=["last"], schedule="1f1b", timeout=60)
    pipe.step(batch)
    plain(batch).backward()
    found = pipe.clip_grad_norm_(1e-3)
    assert_close("norm", found.cpu(), torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-3))
    return float(found)


@pytest.mark.slow
def test_a_stage_with_nothing_to_clip() -> None:
    first, last = run_standin(_clip_nothing, ranks=2)
    assert first == last > 0


def _by_dtype(late: bool) -> list[str]:
    """Send a tensor of each dtype both ways; the device's backend refuses int16, and knows no bool.

    With `late`, the channels are needed only after set-up, and messages go through host memory.
    """
    from datetime import timedelta

    from pipepart.runtime.mesh import Groups, Mesh
    from pipepart.runtime.transport import broadcast, choose_transport

    rank = torch.distributed.get_rank()
    device = torch.device("standin", rank)
    groups = Groups.create(Mesh(1, 2), timedelta(seconds=60), device)
    transport = choose_transport("auto", groups, device, 60.0)
    if late:
        transport.seal()
    transport.open([(0, 1), (1, 0)])
    dtypes = [
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn,
    ]  # fmt: skip
    for dtype in dtypes:
        for shape in ((), (3, 2)):
            values = torch.randint(0, 2, shape).to(dtype)
            there = values.to(device)
            got = torch.empty_like(there)
            if rank == 0:
                transport.send(there, 1).wait()
                transport.recv(got, 1).wait()
            else:
                transport.recv(got, 0).wait()
                transport.send(got, 0).wait()
            if rank == 0:
                assert torch.equal(got.cpu().float() if dtype.is_floating_point else got.cpu(), _plain(values)), dtype
            if rank == 1:
                got.copy_(torch.zeros_like(got))
            broadcast(got, 0, groups.pipeline)
            assert torch.equal(_plain(got.cpu()), _plain(values)), dtype  # both ranks have drawn the same values
    return [str(dtype) for dtype in dtypes]


def _plain(values: torch.Tensor) -> torch.Tensor:
    return values.float() if values.dtype.is_floating_point else values


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
def test_every_dtype_crosses(late: bool) -> None:
    run_standin(_by_dtype, late, ranks=2)


def _in_a_bound_group() -> float:
    return _compare("gpt", 2, 1, "1f1b", False)[0]


@pytest.mark.slow
def test_a_default_group_that_is_bound_to_a_device() -> None:
    """With `device_id` all transfers of a group share one communicator and one order; ours are independent of it."""
    run_standin(_in_a_bound_group, ranks=2, eager=True)


def _mesh_and_groups() -> tuple[str, int, int]:
    """The type of the device mesh, and the number of process groups that a pipeline leaves behind."""
    import gc

    from torch.distributed.distributed_c10d import _world

    from pipepart import Pipeline

    before = len(_world.pg_map)
    model = build("mlp")
    pipe = Pipeline(model, model.batch(4), stages=2, microbatches=2, schedule="1f1b", timeout=60)
    pipe.step(*model.batch(4))
    kind, during = pipe.device_mesh.device_type, len(_world.pg_map)
    del pipe, model
    gc.collect()
    assert during > before
    return kind, before, len(_world.pg_map)


@pytest.mark.slow
def test_the_mesh_names_the_device_and_groups_are_released() -> None:
    for kind, before, after in run_standin(_mesh_and_groups, ranks=2):
        assert kind == "standin"
        assert after == before


def _too_many() -> str:
    from pipepart.devices import local_device

    try:
        local_device(99)
    except PipepartError as error:
        return str(error)
    return "no error"


@pytest.mark.slow
def test_more_processes_than_devices() -> None:
    (found,) = run_standin(_too_many)
    assert "needs standin:99, but the host has 4 device(s) of this type" in found


class Wide(torch.nn.Module):
    """Eight layers of half a megabyte."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.pow(2).mean()


def _larger_than_a_device() -> tuple[int, bool]:
    """Train a model of 4.2 MB, 8.4 MB with its gradients, with the states of an optimizer 16.8 MB, on two devices of 10 MB."""
    from support import standin

    from pipepart import Pipeline

    torch.manual_seed(0)
    model, plain = Wide().double(), Wide().double()
    plain.load_state_dict(model.state_dict())
    batch = torch.randn(8, 256, dtype=torch.float64)
    standin.set_memory(10_000_000)
    pipe = Pipeline(model, (batch,), stages=2, microbatches=4, schedule="1f1b", timeout=60)
    loss = pipe.step(batch)
    expected = plain(batch)
    expected.backward()
    assert_close("loss", loss.cpu(), expected.detach())
    gradients = dict(plain.named_parameters())
    own = dict(pipe.named_parameters())
    for key, parameter in own.items():
        assert_close(key, parameter.grad.cpu(), gradients[key].grad)
    with pipe.whole_parameters(gradients=True):  # in host memory: no device could hold them
        for key, parameter in pipe.module.named_parameters():
            assert parameter.device.type == "cpu"
            assert torch.equal(parameter, gradients[key])
            assert_close(key, parameter.grad, gradients[key].grad)
    with torch.no_grad():
        assert_close("evaluation", pipe.evaluate(batch).cpu(), plain(batch))
    own = dict(pipe.named_parameters())
    return len(own), all(parameter.device.type == "standin" for parameter in own.values())


@pytest.mark.slow
def test_a_model_that_does_not_fit_on_one_device() -> None:
    answers = run_standin(_larger_than_a_device, ranks=2)
    assert sum(count for count, _ in answers) == 16
    assert all(there for _, there in answers)


def _from_a_library(name: str) -> int:
    """A model of transformers with the batch of a tokenizer; its loss is computed in float32."""
    import transformers

    from pipepart import Pipeline

    small = {"num_hidden_layers": 4, "num_attention_heads": 2, "hidden_size": 32, "vocab_size": 64}
    config = transformers.AutoConfig.for_model(name, **small, intermediate_size=64)
    torch.manual_seed(0)
    model, plain = (transformers.AutoModelForCausalLM.from_config(config).eval().double() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    ids = torch.randint(0, 64, (8, 12))
    batch = {"input_ids": ids, "labels": ids}
    for module in (*model.modules(), *plain.modules()):
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    layers = {"gpt2": "transformer.h", "llama": "model.layers"}[name]
    pipe = Pipeline(
        model, (), batch, stages=2, microbatches=4, schedule="1f1b", timeout=60, split_at=[f"{layers}.2"]
    )  # where a busy machine would cut depends on its measurements
    loss, expected = pipe.step(**batch)["loss"], plain.train()(**batch).loss
    expected.backward()
    assert_close("loss", loss.cpu(), expected.detach(), 1e-5)
    gradients = dict(plain.named_parameters())
    for key, parameter in pipe.named_parameters():
        assert_close(key, parameter.grad.cpu(), gradients[key].grad, 1e-5)
    return len(list(pipe.named_parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_models_of_a_library(name: str) -> None:
    assert all(run_standin(_from_a_library, name, ranks=2))
