"""Checks of each device by itself: its memory holds what is written, and its products are those of the CPU."""

from __future__ import annotations

import os

import torch

from pipepart.cli.selftest.crew import Place
from pipepart.cli.selftest.verdicts import Verdict, failed, passed, skipped
from pipepart.devices import computes_on_host, device_name, memory_of, synchronize
from pipepart.machine import usable

__all__ = ["can_hold", "check_memory", "check_products", "total_memory"]

_SIZE = 256  # rows and columns of the products
_PART = 1 << 24  # bytes that are written at once
_TOLERANCES = {"float64": 1e-12, "float32": 1e-4, "bfloat16": 3e-2, "float16": 4e-3}
"""The largest difference from the product in float64 on the CPU, relative to the largest entry."""


def can_hold(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether tensors of this dtype can be made on `device`."""
    try:
        torch.zeros(2, device=device, dtype=torch.uint8)
        torch.empty(2, device=device, dtype=dtype)
        synchronize(device)
    except (TypeError, RuntimeError, NotImplementedError):
        return False
    return True


def total_memory(device: torch.device, ranks: int) -> float | None:
    """Return the bytes of memory of a device: for the CPU, the share of one of `ranks` processes; None if not known."""
    if computes_on_host(device):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / max(1, ranks)
    found = memory_of(device)
    return None if found is None else float(found.total)


def check_memory(place: Place) -> Verdict:
    """Fill a part of the memory of the device with a pattern, and read all of it back."""
    device, found = place.device, memory_of(place.device)
    total = total_memory(device, place.size)
    most = (1 << 26) if place.settings.quick else (1 << 28) if computes_on_host(device) else (1 << 32)
    size = most if found is None else min(most, found.free // 4)
    parts = max(1, size // _PART)
    pattern = (torch.arange(_PART, dtype=torch.int64) * 2654435761 >> 13).to(torch.uint8)
    held = [pattern.roll(index).to(device) for index in range(parts)]
    for index, part in enumerate(held):
        if not torch.equal(part.cpu(), pattern.roll(index)):
            return failed(f"{device}: part {index} of {parts} of the memory does not hold what was written to it")
    figures = {"name": device_name(device), "device": str(device), "memory": total, "written": parts * _PART}
    if total is None:
        return Verdict("fail", f"{device} ({device_name(device)}): torch cannot tell its memory", figures)
    return passed(
        f"{device_name(device)}, {total / 1e9:.1f} GB; {parts * _PART / 1e6:.0f} MB written and read", **figures
    )


def check_products(place: Place) -> Verdict:
    """Compare products of matrices in every dtype of floating-point numbers with the CPU."""
    device, errors, without = place.device, {}, []
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.randn(_SIZE, _SIZE, generator=generator, dtype=torch.float64) for _ in range(2))
    for name, tolerance in _TOLERANCES.items():
        dtype = getattr(torch, name)
        if not can_hold(device, dtype) or (computes_on_host(device) and not usable(name)):
            without.append(name)
            continue
        a, b = first.to(dtype), second.to(dtype)
        expected = a.double() @ b.double()
        got = (a.to(device) @ b.to(device)).cpu().double()
        errors[name] = float((got - expected).abs().max() / expected.abs().max())
        if not errors[name] <= tolerance:
            return failed(
                f"{device}: the product of two {_SIZE} x {_SIZE} matrices in {name} differs from the CPU by "
                f"{errors[name]:.2g} of its largest entry; expected at most {tolerance:g}",
                errors=errors,
            )
    if not errors:
        return skipped(f"{device} has none of {', '.join(_TOLERANCES)}")
    text = ", ".join(f"{name} {error:.1g}" for name, error in errors.items())
    return passed(f"{text}{'; without ' + ', '.join(without) if without else ''}", errors=errors)
