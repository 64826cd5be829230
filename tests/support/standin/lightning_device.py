"""The stand-in device for Lightning: `Trainer(accelerator="standin", devices=2)` after `register_accelerator()`."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry

__all__ = ["StandinAccelerator", "register_accelerator"]


class StandinAccelerator(Accelerator):
    """Tells Lightning how many devices there are and how one becomes the current one."""

    def setup_device(self, device: torch.device) -> None:
        if device.type != "standin":
            raise ValueError(f"the accelerator of the stand-in expected a standin device, got {device}")
        torch.accelerator.set_device_index(0 if device.index is None else device.index)

    def teardown(self) -> None:
        pass

    def get_device_stats(self, device: torch.device | str | int) -> dict[str, Any]:
        return torch.get_device_module("standin").memory_stats(device)

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        if isinstance(devices, str):
            devices = -1 if devices in ("auto", "-1") else [int(part) for part in devices.split(",") if part.strip()]
        count = StandinAccelerator.auto_device_count()
        wanted = (
            list(devices) if isinstance(devices, (list, tuple)) else list(range(count if devices == -1 else devices))
        )
        if any(index not in range(count) for index in wanted):
            raise ValueError(f"devices={devices!r}: this machine has the devices 0 to {count - 1} of the stand-in")
        return wanted

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("standin", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return torch.get_device_module("standin").device_count()

    @staticmethod
    def is_available() -> bool:
        return hasattr(torch, "standin")

    @staticmethod
    def get_device() -> str:
        return "standin"

    @staticmethod
    def name() -> str:
        return "standin"


@cache
def register_accelerator() -> None:
    """Make the accelerator known to Lightning by its name."""
    AcceleratorRegistry.register("standin", StandinAccelerator, description="the stand-in device of the tests")
