"""Outputs of the last stage on their way to the other stages.

After a training step, or an evaluation of one batch, all stages meet: `meet`. Stages of a series do not. The last stage posts
the outputs of a batch when they are final, on a lane beside that of the micro-batches, and goes on. The others take them some
batches later, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pipepart.devices import read_together
from pipepart.runtime.mesh import Groups
from pipepart.runtime.transport import Posts, Transport, broadcast, received, second_lane, sendable, share

__all__ = ["Results", "Separate"]


class Separate(list):
    """The values of one output for each micro-batch. They stay on the last stage."""


class Results:
    """The way of outputs from the last stage to all stages of the replica."""

    def __init__(self, groups: Groups | None, control: Transport | None, last: int, device: torch.device) -> None:
        self._groups, self._control, self._last, self._device = groups, control, last, device
        self.lane: Transport | None = None
        self._posts: Posts | None = None
        self._expected = self._received = 0
        """The numbers of results so far. All stages count alike, whoever takes them."""
        self._kept: dict[int, tuple[list[Any], Any]] = {}
        """Results by number that were received and not taken."""
        self._unwanted: set[int] = set()

    def meet(self, merged: list[Any] | None, everywhere: bool, by_device: bool = False) -> list[Any]:
        """Return the outputs on all stages; `merged` are those of the last stage. All stages must call it together.

        Unless `everywhere`, tensors with dimensions stay on the last stage. `by_device`: scalars go from device to device.
        """
        if self._groups is None or self._control is None:
            assert merged is not None
            return merged
        described = _described(merged, by_device) if merged is not None else None
        described = share(described, self._groups, self._control, self._last)
        if by_device:
            self._meet_scalars(described, merged)
        if merged is not None and not everywhere:
            return merged
        outputs: list[Any] = []
        for index, (kind, *content) in enumerate(described):
            own = merged[index] if merged is not None else None
            if kind == "tensor" and everywhere:
                buffer = self._empty(*content) if own is None else own.contiguous()
                broadcast(buffer, self._groups.rank_of_stage(self._last), self._groups.pipeline)
                outputs.append(buffer)
            else:
                outputs.append(own if kind == "here" else self._read(kind, content))
        return outputs

    def _read(self, kind: str, content: Sequence[Any]) -> Any:
        if kind == "plain":
            return content[0]
        if kind == "scalar":  # its value is in the description; it is not copied from the host, which would wait
            return torch.full((), content[0], dtype=content[1], device=self._device)
        return None

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _meet_scalars(self, described: list[tuple[Any, ...]], merged: list[Any] | None) -> None:
        """Send scalars from device to device in one message, and put them into the descriptions."""
        assert self._groups is not None
        found = [(index, content[1]) for index, (kind, *content) in enumerate(described) if kind == "scalar"]
        if not found:
            return
        sizes = [dtype.itemsize for _, dtype in found]
        if merged is None:
            packed = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        else:
            packed = torch.cat([merged[i].to(self._device).reshape(1).view(torch.uint8) for i, _ in found])
        broadcast(packed, self._groups.rank_of_stage(self._last), self._groups.pipeline)
        for (index, dtype), part in zip(found, packed.split(sizes)):
            described[index] = ("plain", part.clone().view(dtype).reshape(()))

    # ---- in a series

    def open_lane(self, transport: Transport) -> None:
        """Make the lane for results, if there can be one. All stages of the replica must call it together."""
        if self.lane is None and self._groups is not None:
            self.lane = second_lane(transport, self._groups)
            if self.lane is not None:
                self._posts = Posts(self._groups, self.lane)

    def close(self) -> None:
        """Release the connections of the lane."""
        if self.lane is not None:
            self.lane.close()

    def post(self, merged: list[Any], made: Any, most: int) -> int:
        """Send the outputs of a batch from the last stage, with what was `made` of them there. Returns their number.

        It waits for the others if more than `most` results are under way.
        """
        assert self._groups is not None and self._posts is not None
        described = _described(merged, False)
        tensors = [value for value, (kind, *_) in zip(merged, described) if kind == "tensor"]
        others = [stage for stage in range(self._groups.mesh.stages) if stage != self._last]
        self._posts.send((described, made), others, most, tensors)
        return self.expect()

    def arrived(self, number: int) -> None:
        """Wait on the last stage until the others have the result with this number: afterwards this process may end."""
        if self._posts is not None:
            self._posts.finish(number + 1)

    def expect(self) -> int:
        """Return the number of the next result, on a stage that will take it."""
        self._expected += 1
        return self._expected - 1

    def take(self, number: int) -> tuple[list[Any], Any]:
        """Wait for the result with this number, on a stage that is not the last one."""
        while number not in self._kept:
            self._receive()
        return self._kept.pop(number)

    def drop(self, number: int) -> None:
        """Forget a result that nobody will take."""
        if self._kept.pop(number, None) is None:
            self._unwanted.add(number)

    def _receive(self) -> None:
        """Receive the next result, and keep it unless nobody wants it."""
        assert self._groups is not None and self.lane is not None
        described, made = received(self._groups, self.lane, self._last)
        outputs = [None if kind == "tensor" else self._read(kind, content) for kind, *content in described]
        arriving = []
        for index, (kind, *content) in enumerate(described):
            if kind == "tensor":
                outputs[index] = buffer = self._empty(*content)
                if buffer.numel():
                    arriving.append(self.lane.recv(sendable(buffer), self._last))
        for pending in arriving:
            pending.wait()
        number, self._received = self._received, self._received + 1
        if number in self._unwanted:
            self._unwanted.remove(number)
        else:
            self._kept[number] = outputs, made


def _described(values: Sequence[Any], unread: bool) -> list[tuple[Any, ...]]:
    """Return the descriptions of outputs for other stages: the value if it is small, the form if it is a tensor.

    With `unread`, scalars have no value in their description.
    """
    tensors = [v for v in values if isinstance(v, torch.Tensor) and v.dim() == 0]
    scalars = iter([None] * len(tensors) if unread else read_together(tensors))
    found: list[tuple[Any, ...]] = []
    for value in values:
        if isinstance(value, Separate):
            found.append(("here",))
        elif not isinstance(value, torch.Tensor):
            found.append(("plain", value))
        elif value.dim() == 0:
            found.append(("scalar", next(scalars), value.dtype))
        else:
            found.append(("tensor", tuple(value.shape), value.dtype))
    return found
