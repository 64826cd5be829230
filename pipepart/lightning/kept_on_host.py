"""Models that are too large for one device: their values stay in host memory until each rank knows its part.

Such a model is planned like one that was built on the meta device: the step is recorded by shapes, costs are computed, and no
rank ever has the whole model on its device. Then each rank moves the values of its own stage there. After the run the model
is whole again, in host memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from pipepart.devices import Memory, memory_of
from pipepart.lightning.materialise import empty_names
from pipepart.lightning.ranks import Ranks
from pipepart.runtime import StageRuntime
from pipepart.runtime.foreign import become, fill_in

__all__ = ["HostValues", "only_shapes", "too_large"]

_FRACTION = 0.4
"""Part of the free memory that a model may take: recording and measuring it also need its gradients and activations."""


def too_large(module: nn.Module, ranks: Ranks) -> bool:
    """Whether a module must not be moved to the devices of ranks as a whole; every rank must call it.

    On the CPU it is where it stays. A single process needs the whole model on its device anyway.
    """
    device = ranks.device
    memory = memory_of(device)
    if memory is None or ranks.mesh.stages == 1:
        return False
    return ranks.decide(not empty_names(module) and _exceeds(module, device, memory), all=False)


def _exceeds(module: nn.Module, device: torch.device, memory: Memory) -> bool:
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    there = sum(tensor.nbytes for tensor in tensors.values() if tensor.device == device)
    return sum(tensor.nbytes for tensor in tensors.values()) > _FRACTION * (memory.free + there)


class HostValues:
    """The values of a module, which has only shapes meanwhile."""

    def __init__(self, module: nn.Module) -> None:
        """Take the values out of a module. Its parameters keep their identity, and tied ones stay tied."""
        self._module = module
        self._parameters = {name: p.detach().to("cpu") for name, p in module.named_parameters()}
        self._buffers = {name: buffer.detach().to("cpu") for name, buffer in module.named_buffers()}
        for _, parameter in module.named_parameters():
            become(parameter, None)
        shapes = {id(buffer): torch.empty_like(buffer, device="meta") for buffer in module.buffers()}
        self._replace_buffers(shapes)

    def _replace_buffers(self, made: dict[int, torch.Tensor]) -> None:
        """Put other tensors into the places of buffers, which are given by their identity."""
        for part in self._module.modules():
            for key, buffer in part._buffers.items():
                if buffer is not None and id(buffer) in made:
                    part._buffers[key] = made[id(buffer)]

    def give_back(self, runtime: StageRuntime) -> None:
        """Give the parameters and buffers of this stage their values, and forget the others."""
        for name, parameter in runtime.named_parameters().items():
            fill_in(parameter, self._parameters[name])
        self._fill_buffers(runtime.held_buffers)
        runtime.parts.drop_empty_buffers()
        runtime.parts.gathers_on_host = True
        self._parameters, self._buffers = {}, {}

    def put_back(self) -> None:
        """Give all tensors their values again, since there is no plan."""
        for name, parameter in self._module.named_parameters():
            if name in self._parameters and parameter.is_meta:
                fill_in(parameter, self._parameters[name])
        self._fill_buffers(self._buffers)

    def _fill_buffers(self, names: Collection[str]) -> None:
        self._replace_buffers(
            {id(b): self._buffers[name] for name, b in self._module.named_buffers() if name in names and b.is_meta}
        )


@contextmanager
def only_shapes(module: nn.Module, wanted: bool) -> Iterator[HostValues | None]:
    """Inside, a module has only shapes, if that is `wanted`; its values are those of the result. An error brings them back."""
    values = HostValues(module) if wanted else None
    try:
        yield values
    except BaseException:
        if values is not None:
            values.put_back()
        raise
