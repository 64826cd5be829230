"""This machine with accelerators: measured by the functions of `devices`, of which each test replaces some."""

from __future__ import annotations

import math

import pytest
import torch

from pipepart.cost import this_machine as machine
from pipepart.devices import Memory


def measured(
    monkeypatch: pytest.MonkeyPatch, count: int, memory: Memory | None
) -> tuple[machine.MeasuredMachine, list]:
    """Measure a machine with devices that compute on the host; return also the devices that were waited for."""
    waited: list[torch.device] = []
    monkeypatch.setattr(machine, "accelerator", lambda: "meta")
    monkeypatch.setattr(machine, "device_count", lambda: count)
    monkeypatch.setattr(machine, "device_name", lambda device: "Some GPU")
    monkeypatch.setattr(machine, "memory_of", lambda device: memory)
    monkeypatch.setattr(machine, "synchronize", waited.append)
    monkeypatch.setattr(machine, "pinned", lambda tensor, device: tensor)
    return machine.measure_machine(), waited


def test_both_devices_of_a_copy_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found, waited = measured(monkeypatch, 4, Memory(9_000_000_000, 10_000_000_000))
    assert torch.device("meta", 3) in waited
    assert torch.device("meta", 0) in waited
    assert (found.count, found.device.name, found.link.name) == (4, "some_gpu", "peer")
    assert found.device.memory == 9_000_000_000, "less the reserve, whatever is free now"


def test_a_device_that_does_not_tell_its_memory_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = measured(monkeypatch, 2, None)
    assert math.isfinite(found.device.memory)
    assert found.device.memory >= 1e15


def test_a_single_device_copies_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[tuple[str, str]] = []
    copy = torch.Tensor.copy_

    def watched(self: torch.Tensor, source: torch.Tensor, **more: object) -> torch.Tensor:
        copies.append((source.device.type, self.device.type))
        return copy(self, source)

    monkeypatch.setattr(machine, "synchronize", lambda device: None)
    monkeypatch.setattr(machine, "pinned", lambda tensor, device: tensor.to("cpu"))
    monkeypatch.setattr(torch.Tensor, "copy_", watched)
    one = torch.device("cpu")
    link = machine._peer_link(one, one, size=1 << 12)
    assert len(copies) == 2 * 2 * 8, "there and back, for two sizes, once to warm up and seven times"
    assert link.latency > 0
    assert math.isfinite(link.bandwidth)
