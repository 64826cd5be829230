"""Checks of transports: tensors of every dtype and form arrive bit for bit, between every two ranks in both directions."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from pipepart.cli.selftest.crew import Place
from pipepart.cli.selftest.device_checks import can_hold
from pipepart.cli.selftest.verdicts import Verdict, failed, passed, skipped
from pipepart.devices import computes_on_host, synchronize
from pipepart.errors import ConfigError

__all__ = ["DTYPES", "TRANSPORTS", "check_messages"]

DTYPES = tuple(
    name
    for name in (
        "float64", "float32", "float16", "bfloat16",
        "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool",
        "complex64", "complex128",
        "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
    )
    if hasattr(torch, name)
)  # fmt: skip
"""The dtypes of this version of torch whose elements are whole bytes."""

TRANSPORTS = {
    "shared memory": ("shared_memory", True),
    "group, host memory": ("group", True),
    "group, device memory": ("group", False),
}
"""The transports by their names in the report: the option `transport`, and whether tensors are in host memory."""

_SHAPES = {
    "contiguous": (7, 33),
    "transposed": (19, 8),
    "zero-dim": (),
    "empty": (0, 5),
    "large": (300, 1000),
}


def check_messages(place: Place, title: str, dtype_name: str) -> Verdict:
    """Send tensors of one dtype between every two ranks, and compare their bytes."""
    transport_name, in_host_memory = TRANSPORTS[title]
    device, dtype = place.host if in_host_memory else place.device, getattr(torch, dtype_name)
    if not in_host_memory and computes_on_host(device):
        return skipped("the devices are CPUs: device memory is host memory")
    if not can_hold(device, dtype):
        return skipped(f"{device.type} has no tensors of {dtype_name}")
    try:
        transport = place.transport(transport_name, device)
    except ConfigError as error:
        return skipped(str(error).split(";")[0].split(". ")[0])
    wrong = []
    # One pair after the other, in the same order on all ranks: this ends on devices with one hardware queue, too.
    for source, target in [(a, b) for a in range(place.size) for b in range(place.size) if a != b]:
        if place.rank not in (source, target):
            continue
        values = list(_values(source, target, dtype, device))
        if place.rank == source:
            for pending in [transport.send(value, target) for _, value in values]:
                pending.wait()
            synchronize(device)
            continue
        buffers = [torch.empty_like(value) for _, value in values]
        for pending in [transport.recv(buffer, source) for buffer in buffers]:
            pending.wait()
        synchronize(device)
        for (form, value), buffer in zip(values, buffers):
            if not torch.equal(_bytes(value), _bytes(buffer)):
                wrong.append(f"{form} from rank {source}")
    place.meet()
    if wrong:
        return failed(f"{len(wrong)} tensor(s) of {dtype_name} arrived with other bytes: {', '.join(wrong[:5])}")
    return passed(f"{len(_SHAPES)} forms between {place.size} ranks, equal bit for bit")


def _values(source: int, target: int, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a tensor of each form, with random bits that both ends know."""
    generator = torch.Generator().manual_seed(1000 * source + target)
    for form, shape in _SHAPES.items():
        most = 2 if dtype == torch.bool else 256
        raw = torch.randint(0, most, (math.prod(shape) * dtype.itemsize,), generator=generator, dtype=torch.uint8)
        value = raw.to(device).view(dtype).reshape(shape)
        # As in a pipeline: what is not contiguous is copied before it is sent.
        yield form, (value.t() if form == "transposed" else value).contiguous()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8).cpu()
