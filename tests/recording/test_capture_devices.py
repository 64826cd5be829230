"""Recordings of models for another device than that on which they were built or recorded.

On a build of torch without an accelerator, fake tensors carry the name of one: ops without gradients run on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pipepart.recording import record, split
from pipepart.recording.op import op_of
from pipepart.recording.recorded import Recording

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


class Positions(nn.Module):
    """Makes tensors on the device of its input, and one on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.shift = nn.Buffer(torch.zeros(4))
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(x.shape[1], device=x.device)
        weights = torch.tensor([1.0, 2.0, 3.0, 4.0], device=self.shift.device)
        kept = torch.ones(4, device=torch.device("cpu")).sum()
        return self.layer(x + steps) * weights + self.shift + kept


def recorded_on(device: torch.device) -> Recording:
    """Return the recording of a model that was built on meta, with an example on a device that this machine lacks."""
    with torch.device("meta"):
        model = Positions()
    with FakeTensorMode():
        x = torch.zeros(3, 4, device=device)
    return record(model, (x,))


def test_a_model_that_stays_on_the_host_is_recorded_for_the_device_of_the_example() -> None:
    model = Positions()
    weight = model.layer.weight
    with FakeTensorMode():
        x = torch.zeros(3, 4, device=SECOND)
    recording = record(model, (x,))
    assert recording.device == SECOND
    assert devices_in(recording) == {SECOND, torch.device("cpu")}
    assert model.layer.weight is weight
    assert recording.hash == recorded_on(FIRST).hash


def devices_in(recording_or_chunk: object) -> set[torch.device]:
    graph = getattr(recording_or_chunk, "graph", None) or recording_or_chunk.module.graph  # type: ignore[attr-defined]
    return {a for node in graph.nodes for a in (*node.args, *node.kwargs.values()) if isinstance(a, torch.device)}


def test_a_model_on_meta_is_recorded_on_the_device_of_the_example() -> None:
    recording = recorded_on(SECOND)
    assert recording.device == SECOND
    assert devices_in(recording) == {SECOND, torch.device("cpu")}
    assert all(parameter.is_meta for parameter in recording.root.parameters())
    assert recording.hash == recorded_on(FIRST).hash == recorded_on(torch.device("cpu")).hash


def test_chunks_make_tensors_on_the_device_of_their_stage() -> None:
    recording = recorded_on(FIRST)
    half = [0] * (len(recording.ops) // 2)
    chunks = split(recording, half + [1] * (len(recording.ops) - len(half)), 2, devices=[FIRST, SECOND])
    assert {device.index for device in devices_in(chunks[0])} <= {0, None}
    assert SECOND in devices_in(chunks[1])
    assert FIRST not in devices_in(chunks[1])


def test_a_device_that_the_model_names_itself_is_kept() -> None:
    recording = recorded_on(FIRST)
    (chunk,) = split(recording, [0] * len(recording.ops), 1, devices=[SECOND])
    assert devices_in(chunk) == {SECOND, torch.device("cpu")}


class Outside(nn.Module):
    """Reads a tensor that belongs to no module."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.tables = [table]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.tables[0] + torch.arange(4, device=x.device)


def test_a_recording_is_replayed_on_another_device_with_its_constants() -> None:
    model, x = Outside(torch.arange(4.0)), torch.rand(3, 4)
    recording = record(model, (x,))
    assert any(isinstance(value, torch.Tensor) for value in recording.constants.values())
    (chunk,) = split(recording, [0] * len(recording.ops), 1, devices=[torch.device("meta")])
    model.to("meta")
    (out,) = chunk.module(x.to("meta"))
    assert out.is_meta
    with torch.no_grad():
        same = split(recording, [0] * len(recording.ops), 1, devices=[torch.device("cpu")])[0].module
    assert same.code.count("device(type='cpu')") == 1


def test_autocast_of_the_device_decides_the_dtypes_of_a_model_on_meta() -> None:
    with autocast_enabled(FIRST.type):
        recording = recorded_on(FIRST)
    (layer,) = [node for node in recording.ops if node.op == "call_module"]
    assert op_of(layer).dtype == torch.bfloat16


@contextmanager
def autocast_enabled(kind: str) -> Iterator[None]:
    """Switch autocast on; `torch.autocast` refuses a device that this machine lacks."""
    dtype = torch.get_autocast_dtype(kind)
    torch.set_autocast_dtype(kind, torch.bfloat16)
    torch.set_autocast_enabled(kind, True)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, False)
        torch.set_autocast_dtype(kind, dtype)
        torch.clear_autocast_cache()
