"""Values of other stages on this rank for the time of a call: the ones that are asked for, in few large messages."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from pipepart.runtime.failure import guarded
from pipepart.runtime.foreign import ForeignTensor, fill_in
from pipepart.runtime.meeting import reduce_numbers
from pipepart.runtime.mesh import Groups
from pipepart.runtime.stage import StageRuntime
from pipepart.runtime.transport import broadcast

__all__ = ["Gathering", "Wanted"]

_MESSAGE = 32 * 2**20
"""Bytes of a message, at most, unless a single tensor is larger."""


@dataclass(frozen=True)
class Wanted:
    """Tensors by full name: parameters, buffers, and parameters whose gradients are meant."""

    parameter: frozenset[str] = frozenset()
    buffer: frozenset[str] = frozenset()
    gradient: frozenset[str] = frozenset()

    def __or__(self, other: Wanted) -> Wanted:
        return Wanted(self.parameter | other.parameter, self.buffer | other.buffer, self.gradient | other.gradient)

    def __sub__(self, other: Wanted) -> Wanted:
        return Wanted(self.parameter - other.parameter, self.buffer - other.buffer, self.gradient - other.gradient)

    def has(self, kind: str, name: str) -> bool:
        found: frozenset[str] = getattr(self, kind)
        return name in found

    def __len__(self) -> int:
        return len(self.parameter) + len(self.buffer) + len(self.gradient)


class Gathering:
    """The tensors of other stages that this rank holds during a call. All stages of a replica must call it together."""

    def __init__(self, runtime: StageRuntime, groups: Groups) -> None:
        self._runtime, self.groups, self.root = runtime, groups, runtime.root
        self._stage, self.device = runtime.stage, runtime.device
        self.here = Wanted()
        """The tensors that are on every rank now."""
        self._stack = ExitStack()
        self.gradients: dict[str, torch.Tensor] = {}
        """Gradients of parameters of other stages that have no values here."""
        self.parameters: Mapping[str, nn.Parameter] = dict(self.root.named_parameters())
        self.names: Mapping[int, str] = {id(p): name for name, p in self.parameters.items()}
        """The name of each parameter by the identity of its object, which stays the same."""

    @property
    def everything(self) -> Wanted:
        """All tensors of the model, and the gradients of all parameters."""
        names = frozenset(self.parameters)
        return Wanted(names, frozenset(name for name, _ in self.root.named_buffers()), names)

    def home(self, kind: str, name: str) -> int:
        """Return the stage whose values of a tensor count."""
        ownership = self._runtime.ownership
        return ownership.buffers[name] if kind == "buffer" else ownership.parameters[name][0]

    def holders(self, parameter: str) -> frozenset[int]:
        """Return the stages that hold a copy of a parameter."""
        return frozenset(self._runtime.ownership.parameters[parameter])

    def buffers(self) -> dict[str, torch.Tensor]:
        return dict(self.root.named_buffers())

    def tensor(self, kind: str, name: str) -> torch.Tensor | None:
        """Return a tensor of the module as it is on this rank."""
        if kind == "buffer":
            return self.buffers().get(name)
        parameter = self.parameters[name]
        if kind == "parameter":
            return parameter
        return self.gradients.get(name) if isinstance(parameter, ForeignTensor) else parameter.grad

    def is_filled(self, name: str) -> bool:
        """Return whether a parameter of another stage has values here."""
        return self._stage not in self._runtime.ownership.parameters[name] and name in self.here.parameter

    def bytes_of(self, wanted: Wanted) -> int:
        """Return the bytes of tensors, as far as this rank knows their sizes."""
        known = self.buffers()
        tensors: list[torch.Tensor] = [self.parameters[name] for name in (*wanted.parameter, *wanted.gradient)]
        tensors += [known[name] for name in wanted.buffer if name in known]
        return sum(t.numel() * t.element_size() for t in tensors)

    def gather(self, wanted: Wanted) -> None:
        """Bring tensors that are not here yet. Those that are here stay as they are."""
        if self._runtime.parts.gathers_at_once:
            if not len(self.here):
                self._stack.enter_context(self._runtime.parts.gathered(gradients=True))
            self.here = self.everything
            return
        missing = wanted - self.here
        with guarded(self.groups), torch.inference_mode(False), torch.no_grad():
            for name, values in self._brought("parameter", sorted(missing.parameter)):
                fill_in(self.parameters[name], values)
                self.parameters[name].grad = self.gradients.pop(name, None)
            if missing.buffer:
                self._runtime.parts.gather_buffers(self.groups, self.device, missing.buffer)
            if missing.gradient:
                self._gather_gradients(sorted(missing.gradient))
        self.here = self.here | missing

    def _gather_gradients(self, names: Sequence[str]) -> None:
        exists = torch.tensor(
            [
                self.home("gradient", name) == self._stage and self.tensor("gradient", name) is not None
                for name in names
            ],
            dtype=torch.uint8,
        )
        reduce_numbers(exists, self.groups, self.groups.pipeline)
        for name, values in self._brought("gradient", [name for name, flag in zip(names, exists.tolist()) if flag]):
            self.set_gradient(name, values)

    def set_gradient(self, name: str, values: torch.Tensor) -> None:
        """Set the gradient of a parameter as it is on this rank."""
        if isinstance(self.parameters[name], ForeignTensor):
            self.gradients[name] = values
        else:
            self.parameters[name].grad = values

    def _brought(self, kind: str, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Send what is at home here, and yield copies of what is held by other stages only."""
        holders = self._runtime.ownership.parameters
        for home, part in self._messages(kind, names):
            forms = [self.parameters[name] for name in part]
            message = torch.empty(sum(form.numel() for form in forms), dtype=forms[0].dtype, device=self.device)
            views = message.split([form.numel() for form in forms])
            if home == self._stage:
                for view, name in zip(views, part):
                    values = self.tensor(kind, name)
                    assert values is not None
                    view.copy_(values.detach().reshape(-1))
            broadcast(message, self.groups.rank_of_stage(home), self.groups.pipeline)
            for view, name, form in zip(views, part, forms):
                if self._stage not in holders[name]:
                    yield name, torch.empty_like(form, device=self.device).copy_(view.view(form.shape))

    def _messages(self, kind: str, names: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
        """Yield the stage and the names of each message; all ranks yield the same."""
        by_home: dict[tuple[int, torch.dtype], list[str]] = {}
        for name in names:
            by_home.setdefault((self.home(kind, name), self.parameters[name].dtype), []).append(name)
        for (home, _), members in by_home.items():
            part: list[str] = []
            size = 0
            for name in members:
                more = self.parameters[name].numel() * self.parameters[name].element_size()
                if part and size + more > _MESSAGE:
                    yield home, part
                    part, size = [], 0
                part.append(name)
                size += more
            yield home, part

    def put_back(self) -> None:
        """Let go of the tensors of other stages. Own ones keep the values that were written to them."""
        if len(self.here):
            with torch.inference_mode(False), torch.no_grad():
                self._stack.close()
                self._runtime.parts.drop()
        self.here, self.gradients = Wanted(), {}

    def share(self, kind: str, names: Collection[str], replicas: bool) -> None:
        """Let the home of each tensor, in the first replica if `replicas`, decide on its values for all that hold it."""
        groups, holders = self.groups, self._runtime.ownership.parameters
        with guarded(groups), torch.inference_mode(False), torch.no_grad():
            for name in sorted(names):
                home, tensor = self.home(kind, name), self.tensor(kind, name)
                if replicas and groups.copies is not None and home == self._stage and tensor is not None:
                    broadcast(tensor.data, groups.mesh.rank(0, home), groups.copies)
                held = holders.get(name, ()) if kind != "buffer" else ()
                if len(held) > 1 and tensor is not None:
                    broadcast(tensor.data, groups.rank_of_stage(home), groups.pipeline)
