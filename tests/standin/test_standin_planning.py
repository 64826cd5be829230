"""Recording, costs and plans on the stand-in device: what they measure, with how much memory and how many waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.ranks import run_standin
from torch import nn


class Tower(nn.Module):
    """Equal layers, and positions that are made on the device of the input."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + torch.arange(x.shape[1], device=x.device) / x.shape[1]
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return h.square().mean()


def _recorded_from_meta() -> None:
    from pipepart.recording import record, split
    from pipepart.recording.op import op_of

    device = torch.device("standin", 1)
    torch.accelerator.set_device_index(1)
    with torch.device("meta"):
        model = Tower(8, 2)
    x = torch.randn(4, 8, device=device)
    with torch.autocast("standin", torch.bfloat16):
        recording = record(model, (x,))
    assert recording.device == device
    made = [node for node in recording.graph.nodes if node.target is torch.arange]
    assert [node.kwargs["device"] for node in made] == [device]
    linears = [node for node in recording.ops if node.op == "call_module"]
    assert {op_of(node).dtype for node in linears} == {torch.bfloat16}
    other = torch.device("standin", 2)
    (chunk,) = split(recording, [0] * len(recording.ops), 1, devices=[other])
    torch.accelerator.set_device_index(2)
    model.to_empty(device=other)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    (loss,) = chunk.module(x.to(other))
    loss.backward()
    assert loss.device == other
    assert all(parameter.grad.device == other for parameter in model.parameters())


def test_a_model_on_meta_is_recorded_on_its_device_and_runs_on_another() -> None:
    run_standin(_recorded_from_meta)


def _measured_from_the_host() -> None:
    from support import standin

    from pipepart.cost import profile
    from pipepart.cost.device_memory import room_of, whole_fits
    from pipepart.recording import record

    device, width = torch.device("standin", 0), 256
    one = 4 * width * (width + 1)  # bytes of a layer
    model, x = Tower(width, 12), torch.randn(4, width, device=device)
    standin.set_memory(8 * one)
    room = room_of(device)
    assert room is not None
    assert room.bytes < 8 * one
    assert not whole_fits(model, device)
    recording = record(model, (x,))
    torch.accelerator.reset_peak_memory_stats(device)
    with standin.counting() as waits:
        costs = profile(recording, recording.flatten((x,)))
    assert torch.accelerator.max_memory_allocated(device) < 6 * one, (
        "the copy of one layer, its gradients, and activations"
    )
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    layers = [i for i, size in enumerate(costs.parameter_bytes) if size]
    assert len(layers) == 12
    assert all(costs.forward[i] > 0 and costs.backward_weight[i] >= 0 for i in layers)
    assert costs.notes == ("the step is not timed as a whole: the model does not fit on one device",)
    assert len(waits) <= 6 * len(costs), "copies from the host wait, marks do not"


def test_a_model_that_does_not_fit_is_measured_from_the_host() -> None:
    run_standin(_measured_from_the_host)


def _full() -> tuple[str, ...]:
    from support import standin

    from pipepart.cost import profile
    from pipepart.recording import record

    device, width = torch.device("standin", 0), 256
    model, x = Tower(width, 4).to(device), torch.randn(64, width, device=device)
    recording = record(model, (x,))
    standin.set_memory(torch.accelerator.memory_allocated(device) + 3 * x.numel() * 4)
    costs = profile(recording, recording.flatten((x,)))
    assert sum(costs.forward) > 0
    return costs.notes


def test_where_memory_ends_costs_are_computed() -> None:
    (notes,) = run_standin(_full)
    assert notes[0].startswith("the memory of the device is too small: the costs of")
    assert len(notes) == 1, "the whole step is not tried"


def _waits() -> tuple[int, int]:
    from support import standin

    from pipepart.cost import profile
    from pipepart.recording import record

    device = torch.device("standin", 0)
    model, x = Tower(8, 6).to(device), torch.randn(4, 8, device=device)
    recording = record(model, (x,))
    with standin.counting() as waits:
        costs = profile(recording, recording.flatten((x,)))
    return len(waits), len(costs)


def test_repeats_of_an_op_share_their_wait() -> None:
    ((waits, ops),) = run_standin(_waits)
    assert waits <= 2 * ops


def _planned(memory: int | None) -> dict[str, Any]:
    from support import standin

    from pipepart import Pipeline

    if memory is not None:
        standin.set_memory(memory)
    torch.manual_seed(1)
    batch = torch.randn(4096, 32)
    pipe = Pipeline(Tower(32, 12), (batch,), stages=2, microbatches=8, schedule="gpipe", timeout=60)
    plan = pipe.plan
    if (
        memory is not None
    ):  # tensors of sends that are under way are not in the plan: their number depends on the other rank
        standin.set_memory(int(1.1 * memory))
    pipe.step(batch)
    return {
        "hash": plan.hash,
        "recomputes": any(plan.recomputes),
        "limit": plan.memory_limit,
        "source": plan.memory_source,
        "links": [name for name, *_ in plan.links],
        "memory": [stage.total for stage in plan.memory],
    }


@pytest.mark.slow
def test_a_plan_knows_the_links_and_the_memory_of_its_devices() -> None:
    free = run_standin(_planned, None, ranks=2)
    assert free[0] == free[1]
    assert free[0]["links"] == ["messages inside a host"]
    assert not free[0]["recomputes"]
    assert free[0]["source"].startswith("device of 1.07 GB, less 0 GB in use and 0.107 GB in reserve on rank")
    short = run_standin(_planned, int(0.95 * min(free[0]["memory"]) / 0.9), ranks=2)
    assert short[0] == short[1]
    assert short[0]["recomputes"]
    assert short[0]["limit"] == pytest.approx(0.95 * min(free[0]["memory"]), rel=1e-3)


def _deferred() -> None:
    from pipepart.recording import record
    from pipepart.runtime.deferred import defer_weights, deferring

    device = torch.device("standin", 0)
    model, x = Tower(8, 2).to(device), torch.randn(4, 8, device=device, requires_grad=True)
    with torch.autocast("standin", torch.bfloat16):
        model(x).backward()
        expected, at_input = [p.grad.clone() for p in model.parameters()], x.grad
        model.zero_grad()
        x.grad = None
        graph = record(model, (x.detach(),)).graph_module()
        assert defer_weights(graph) == 2
        loss = graph(x)[0]
    with deferring() as work:
        loss.backward()
    assert len(work) == 2
    for piece in work:
        piece()
    assert F.mse_loss(x.grad, at_input) < 1e-12
    for parameter, gradient in zip(model.parameters(), expected):
        assert parameter.grad.dtype == torch.float32
        torch.testing.assert_close(parameter.grad, gradient, rtol=2**-7, atol=2**-10)


def test_the_backward_in_two_halves_under_the_autocast_of_a_device() -> None:
    run_standin(_deferred)
