"""The room on an accelerator, from numbers that a device gives."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

from pipepart.cost import device_memory
from pipepart.cost.device_memory import reserve_of, room_of, stays_on_host, whole_fits
from pipepart.devices import Memory

GPU = torch.device("cuda", 1)


def device_with(monkeypatch: pytest.MonkeyPatch, free: int, total: int, own: int) -> None:
    module = types.SimpleNamespace(memory_reserved=lambda device: own)
    monkeypatch.setattr(device_memory, "memory_of", lambda device: Memory(free, total))
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: module)


def test_what_others_use_and_a_reserve_are_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    device_with(monkeypatch, free=9_000_000_000, total=16_000_000_000, own=5_000_000_000)
    room = room_of(GPU)
    assert room is not None
    assert (room.others, room.reserve) == (2_000_000_000, 1_600_000_000)
    assert room.bytes == 12_400_000_000
    assert str(room) == "device of 16 GB, less 2 GB in use and 1.6 GB in reserve"


def test_the_reserve_of_a_large_device_is_bounded() -> None:
    assert reserve_of(80_000_000_000) == reserve_of(200_000_000_000) == 6_000_000_000


def test_the_cpu_has_no_limit() -> None:
    assert room_of(torch.device("cpu")) is None
    assert whole_fits(nn.Linear(4, 4), torch.device("cpu"))


def test_a_model_fits_with_its_gradients_and_some_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1000, 1000, bias=False)  # 4 MB, and 4 MB of gradients
    device_with(monkeypatch, free=12_000_000, total=12_000_000, own=0)
    assert whole_fits(model, GPU)
    device_with(monkeypatch, free=11_500_000, total=11_500_000, own=0)
    assert not whole_fits(model, GPU)
    assert whole_fits(model.requires_grad_(False), GPU)


def test_a_model_that_stays_on_the_host_is_found() -> None:
    assert stays_on_host(nn.Linear(2, 2), GPU)
    assert not stays_on_host(nn.Linear(2, 2), torch.device("cpu"))
    assert not stays_on_host(nn.Linear(2, 2, device="meta"), GPU)
