"""The part of the model that this rank holds: drops the rest, brings it back, and puts the parts of all stages together."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from pipepart.errors import ForeignTensorError
from pipepart.runtime.failure import guarded
from pipepart.runtime.foreign import ForeignTensor, Place, become, fill_in
from pipepart.runtime.meeting import gather_objects, meet
from pipepart.runtime.mesh import Groups
from pipepart.runtime.ownership import Ownership

__all__ = ["Parts"]


class Parts:
    """A module of which each stage holds some parameters. In a job of one process it is always whole."""

    def __init__(
        self,
        root: nn.Module,
        ownership: Ownership,
        groups: Groups | None,
        device: torch.device,
        held_buffers: Collection[str],
        last_stage: int,
    ) -> None:
        """`last_stage`: where steps end, and with them what is in the state dict but neither parameter nor buffer."""
        self.root, self._ownership, self._groups, self._device = root, ownership, groups, device
        self._held_buffers = frozenset(held_buffers)
        self._stage, self._last = groups.stage if groups is not None else 0, last_stage
        self._locks: list[Any] = []
        self._reading = False
        self.whole = True
        self._shape = self._identity()
        self.drop()

    def _identity(self) -> list[Any]:
        """Modules and parameters, to see whether the user has put others in their place."""
        modules = [id(module) for module in self.root.modules()]
        return [modules, [(name, id(p), p.shape, p.dtype) for name, p in self.root.named_parameters()]]

    @property
    def same_model(self) -> bool:
        """Whether the module still has the parameters that it was cut with, so that it can be cut the same way again."""
        return self._identity() == self._shape

    # ---- the values of other stages come and go

    def drop(self) -> None:
        """Keep the values of this stage's parameters; those of other stages become foreign tensors in place."""
        self.unlock()
        if self._groups is None:
            return
        for name, parameter in self._foreign():
            become(parameter, self._place(name, "parameter", self._ownership.parameters[name][0]))
        self.whole = self._groups.mesh.stages == 1

    def drop_empty_buffers(self) -> None:
        """Buffers without memory (the model was built on the meta device) that other stages hold become foreign too."""
        for name, buffer in list(self.root.named_buffers()):
            if buffer.is_meta and name not in self._held_buffers and not isinstance(buffer, ForeignTensor):
                place = self._place(name, "buffer", self._ownership.buffers[name])
                self._set_buffer(name, ForeignTensor.of(buffer, place))

    def cut_again(self) -> None:
        """Drop what is not of this stage once more. The values of rank 0 count, should the ranks have come to differ."""
        if self._groups is not None:
            with guarded(self._groups), torch.no_grad():
                meet(self._groups)
                for tensor in (*self.root.parameters(), *self.root.buffers()):
                    values = tensor.detach().to(self._device).contiguous()
                    dist.broadcast(values, 0)
                    tensor.data.copy_(values)
        self.drop()

    def make_whole(self, device: torch.device | None = None) -> None:
        """All values on every rank, on `device` (by default that of the run). All ranks must call it together."""
        self.unlock()
        device = device or self._device
        if self._groups is None:
            return
        with guarded(self._groups):
            meet(self._groups, inside_replica=True)
            for name, parameter in list(self.root.named_parameters()):
                home = self._groups.rank_of_stage(self._ownership.parameters[name][0])
                here = not parameter.is_meta
                values = parameter.data if here else torch.empty_like(parameter, device=self._device)
                dist.broadcast(values, home, group=self._groups.pipeline)
                if not here:
                    fill_in(parameter, values.to(device))
                elif values.device != device:
                    parameter.data = values.to(device)
            self._make_buffers_whole(self._groups, device)
        self.whole = True

    def _make_buffers_whole(self, groups: Groups, device: torch.device) -> None:
        """Each buffer as the stage has it that updates it. A step may have given it another shape there."""
        own = {
            name: (tuple(buffer.shape), buffer.dtype)
            for name, buffer in self.root.named_buffers()
            if self._ownership.buffers.get(name) == self._stage
        }
        parts = gather_objects(own, groups, inside_replica=True)
        local = dict(self.root.named_buffers())
        for stage, forms in enumerate(parts):
            for name, (shape, dtype) in forms.items():
                buffer = local.get(name)
                if buffer is None or buffer.is_meta or tuple(buffer.shape) != shape or buffer.dtype != dtype:
                    buffer = torch.empty(shape, dtype=dtype, device=self._device)
                values = buffer.detach().contiguous()
                dist.broadcast(values, groups.rank_of_stage(stage), group=groups.pipeline)
                if buffer is not local.get(name) or values.device != device:
                    self._set_buffer(name, values.to(device))
                elif stage != self._stage:
                    buffer.data.copy_(values)

    def _gather_gradients(self, groups: Groups) -> None:
        """Give the parameters of other stages the gradients that they have there."""
        mine = [name for name, p in self.root.named_parameters() if p.grad is not None]
        parts = gather_objects(mine, groups, inside_replica=True)
        for name, parameter in self.root.named_parameters():
            home = self._ownership.parameters[name][0]
            if name in parts[home]:
                values = torch.empty_like(parameter) if parameter.grad is None else parameter.grad
                dist.broadcast(values, groups.rank_of_stage(home), group=groups.pipeline)
                parameter.grad = values

    @contextmanager
    def gathered(self, gradients: bool = False) -> Iterator[None]:
        """All values (and gradients) on every rank for a moment. All ranks must enter it together.

        What is written to a parameter inside holds on the stages that have it, so every rank must write the same.
        """
        if self.whole:
            yield
            return
        self.make_whole()
        if gradients and self._groups is not None:
            with guarded(self._groups):
                self._gather_gradients(self._groups)
        try:
            yield
        finally:
            self.drop()

    @contextmanager
    def by_shapes(self) -> Iterator[None]:
        """Plain meta tensors in the place of foreign ones for a moment, to record a model that is whole nowhere."""
        foreign = list(self._foreign())
        buffers = [(name, buffer) for name, buffer in self.root.named_buffers() if isinstance(buffer, ForeignTensor)]
        for _, parameter in foreign:
            become(parameter, None)
        for name, buffer in buffers:
            self._set_buffer(
                name, torch.empty_strided(buffer.shape, buffer.stride(), dtype=buffer.dtype, device="meta")
            )
        try:
            yield
        finally:
            self.drop()
            for name, buffer in buffers:
                self._set_buffer(name, buffer)

    def _foreign(self) -> Iterator[tuple[str, nn.Parameter]]:
        held = set(self._ownership.held_by(self._stage)) if self._groups is not None else None
        for name, parameter in self.root.named_parameters():
            if held is not None and name not in held:
                yield name, parameter

    def _place(self, name: str, kind: str, stage: int) -> Place:
        assert self._groups is not None
        return Place(name, kind, stage, self._groups.rank_of_stage(stage))

    def _set_buffer(self, name: str, buffer: torch.Tensor) -> None:
        path, _, key = name.rpartition(".")
        self.root.get_submodule(path)._buffers[key] = buffer

    # ---- a module in parts that is used as if it were whole

    def lock(self, why: str) -> None:
        """Until it is cut or whole again, `state_dict` and calls of modules that lack values raise with this sentence."""
        self.unlock()
        if self.whole:
            return
        text = (
            f"{type(self.root).__name__} is in parts, since {why}: this rank holds the values of stage {self._stage} only. Do "
            "one of these, on every rank: `trainer.strategy.make_whole()` first, which gathers all values; or "
            "`trainer.save_checkpoint(path)`, which writes the whole model."
        )
        refuse = _Refusal(self, text)
        for module in self.root.modules():
            tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
            if module is self.root or any(isinstance(tensor, ForeignTensor) for tensor in tensors):
                self._locks.append(module.register_state_dict_pre_hook(refuse))
                self._locks.append(module.register_forward_pre_hook(refuse))

    def unlock(self) -> None:
        for handle in self._locks:
            handle.remove()
        self._locks = []

    # ---- state dicts

    def state_dict(self) -> dict[str, Any]:
        """That of the module; tensors of other stages are in it by their form."""
        before, self._reading = self._reading, True
        try:
            return self.root.state_dict()
        finally:
            self._reading = before

    def full_state_dict(self) -> dict[str, Any]:
        """All parameters and buffers by full name, on rank 0; empty elsewhere. Every rank must call it."""
        own = self.state_dict()
        groups = self._groups
        if groups is None:
            return own
        with guarded(groups):
            mine = self._true_here(own)
            parts: list[Any] | None = [None] * groups.mesh.stages if self._stage == 0 else None
            dist.gather_object(mine, parts, groups.rank_of_stage(0), group=groups.pipeline)
        if groups.rank != 0 or parts is None:
            return {}
        merged = {name: value for part in parts for name, value in part.items()}
        return type(own)((name, merged.get(name, value)) for name, value in own.items())

    def own_state_dict(self) -> dict[str, Any]:
        """The entries of the state dict whose true value is on this stage."""
        state = self.state_dict()
        return state if self._groups is None else self._true_here(state)

    def _true_here(self, state: dict[str, Any]) -> dict[str, Any]:
        """The entries of a state dict whose true value is on this stage, names of ties included."""
        homed = set(self._ownership.homed_at(self._stage))
        objects = {id(p): name for name, p in self.root.named_parameters()}
        buffers = {id(b): name for name, b in self.root.named_buffers()}
        found = {}
        for name, parameter in self.root.named_parameters(remove_duplicate=False):
            if name in state and objects[id(parameter)] in homed:
                found[name] = state[name].detach().cpu()
        for name, buffer in self.root.named_buffers(remove_duplicate=False):
            if name in state and self._ownership.buffers[buffers[id(buffer)]] == self._stage:
                found[name] = state[name].detach().cpu()
        if self._stage == self._last:  # persistent states of metrics and the like are neither
            tensors = {name for name, _ in self.root.named_parameters(remove_duplicate=False)}
            tensors |= {name for name, _ in self.root.named_buffers(remove_duplicate=False)}
            found.update({name: value for name, value in state.items() if name not in tensors})
        return found

    def load_full_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """Take this stage's part of a state dict of the whole model."""
        tensors = (
            *self.root.named_parameters(remove_duplicate=False), *self.root.named_buffers(remove_duplicate=False),
        )  # fmt: skip
        elsewhere = {name for name, tensor in tensors if tensor.is_meta}
        result = self.root.load_state_dict({n: v for n, v in state.items() if n not in elsewhere}, strict=False)
        missing = [name for name in result.missing_keys if name not in elsewhere]
        missing += [name for name in self.state_dict() if name in elsewhere and name not in state]
        if strict and (missing or result.unexpected_keys):
            raise RuntimeError(
                f"the state dict does not fit {type(self.root).__name__}: missing {sorted(missing)}, "
                f"unexpected {sorted(result.unexpected_keys)}"
            )


class _Refusal:
    """A hook of modules in parts: whoever calls them, reads their state or pickles them gets a sentence instead."""

    def __init__(self, parts: Parts, text: str) -> None:
        self._parts, self._text = parts, text

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if not self._parts._reading:
            raise ForeignTensorError(self._text)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Refusal:
        return self

    def __reduce__(self) -> NoReturn:
        raise ForeignTensorError(self._text)
