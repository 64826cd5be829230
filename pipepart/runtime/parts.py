"""The part of the model that each stage holds: ownership, gathering of all parts, and state dicts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from pipepart.devices import move_module
from pipepart.errors import ForeignTensorError
from pipepart.recording import Chunk
from pipepart.runtime.failure import guarded
from pipepart.runtime.foreign import ForeignTensor, Place, become, fill_in
from pipepart.runtime.meeting import exchange_objects, gather_objects, meet
from pipepart.runtime.mesh import Groups
from pipepart.runtime.transport import broadcast

if TYPE_CHECKING:
    from pipepart.runtime.sync.borrowed_parameters import BorrowedParameters

__all__ = ["Ownership", "Parts"]


@dataclass(frozen=True)
class Ownership:
    """The stages that hold each parameter and buffer, by its (first) full name."""

    parameters: Mapping[str, tuple[int, ...]]
    """For each parameter the stages that hold a copy, its home first. A parameter with several stages is tied."""
    buffers: Mapping[str, int]
    """For each buffer its home: the stage that updates it."""
    chunks: Mapping[str, tuple[int, ...]]
    """For each parameter and buffer the chunks that use it."""
    placement: tuple[int, ...]
    """The stage of each chunk."""

    @staticmethod
    def of(root: nn.Module, chunks: Sequence[Chunk], placement: Sequence[int]) -> Ownership:
        """Return the ownership of the tensors of `root`. The home of tensors that no chunk uses is stage 0."""
        uses: dict[str, list[int]] = {}
        for chunk in chunks:
            for name in (*chunk.parameters, *chunk.buffers):
                uses.setdefault(name, []).append(chunk.index)
        stages = {name: [placement[chunk] for chunk in used] for name, used in uses.items()}
        parameters = {name: tuple(sorted(set(stages.get(name, [0])))) for name, _ in root.named_parameters()}
        named = dict.fromkeys((*dict(root.named_buffers()), *(name for chunk in chunks for name in chunk.buffers)))
        buffers = {name: stages.get(name, [0])[0] for name in named}
        return Ownership(parameters, buffers, {name: tuple(used) for name, used in uses.items()}, tuple(placement))

    def held_by(self, stage: int) -> list[str]:
        """Return the parameters that a stage holds."""
        return [name for name, stages in self.parameters.items() if stage in stages]

    def homed_at(self, stage: int) -> list[str]:
        """Return the parameters whose home is this stage; each parameter has one home."""
        return [name for name, stages in self.parameters.items() if stages[0] == stage]

    def buffers_held_by(self, stage: int) -> frozenset[str]:
        """Return the buffers that chunks of a stage use, and those whose home it is."""
        return frozenset(name for name, home in self.buffers.items() if home == stage or self._chunks_on(stage, name))

    def uses(self, stage: int) -> dict[str, tuple[int, ...]]:
        """Return the chunks of a stage that use each of its parameters."""
        found = {name: self._chunks_on(stage, name) for name in self.chunks if name in self.parameters}
        return {name: chunks for name, chunks in found.items() if chunks}

    def _chunks_on(self, stage: int, name: str) -> tuple[int, ...]:
        return tuple(chunk for chunk in self.chunks.get(name, ()) if self.placement[chunk] == stage)

    @property
    def tied(self) -> dict[str, tuple[int, ...]]:
        """The stages of each parameter that several stages hold."""
        return {name: stages for name, stages in self.parameters.items() if len(stages) > 1}


class Parts:
    """A module of which each stage holds some parameters. In a job of one process the module is always whole."""

    def __init__(
        self,
        root: nn.Module,
        ownership: Ownership,
        groups: Groups | None,
        device: torch.device,
        held_buffers: Collection[str],
        last_stage: int,
        borrowed: BorrowedParameters | None = None,
    ) -> None:
        """`last_stage`: the home of entries of the state dict that are neither parameters nor buffers.

        `borrowed`: the parameters of this stage, if replicas borrow them from each other.
        """
        self.root, self._ownership, self._groups, self._device = root, ownership, groups, device
        self._held_buffers = frozenset(held_buffers)
        self._stage, self._last = groups.stage if groups is not None else 0, last_stage
        self._borrowed = borrowed
        self._locks: list[Any] = []
        self.gathers_on_host = False
        """Whether the whole model is held in host memory, since it does not fit on the device."""
        self.reading = False
        self.whole = True
        self._shape = self._identity()
        self.drop()

    def _identity(self) -> list[Any]:
        """Return the identity of all modules and parameters, to see whether the user has replaced some."""
        modules = [id(module) for module in self.root.modules()]
        return [modules, [(name, id(p), p.shape, p.dtype) for name, p in self.root.named_parameters()]]

    @property
    def same_model(self) -> bool:
        """Whether the module still has the modules and parameters of set-up, so that the plan still fits."""
        return self._identity() == self._shape

    @property
    def gathers_at_once(self) -> bool:
        """Whether values can only be gathered together: those of other replicas, too, or into host memory."""
        return self.gathers_on_host or self._borrowed is not None

    # ---- values of other stages

    def drop(self) -> None:
        """Keep the parameters of this stage; parameters of other stages become foreign tensors in place."""
        self.unlock()
        if self._groups is None:
            return
        for name, parameter in self._foreign():
            if not isinstance(parameter, ForeignTensor):
                become(parameter, self._place(name, "parameter", self._ownership.parameters[name][0]))
        if self._borrowed is not None:
            self._borrowed.hide("whole")
            self._borrowed.rest()
        self.whole = self._groups.mesh.stages == 1 and self._borrowed is None

    def drop_empty_buffers(self) -> None:
        """Make buffers of other stages foreign if they have no memory, since the model was built on the meta device."""
        for name, buffer in list(self.root.named_buffers()):
            if buffer.is_meta and name not in self._held_buffers and not isinstance(buffer, ForeignTensor):
                place = self._place(name, "buffer", self._ownership.buffers[name])
                self._set_buffer(name, ForeignTensor.of(buffer, place))

    def cut_again(self) -> None:
        """Take the values of rank 0 on all ranks, and drop those of other stages again."""
        if self._groups is not None:
            with guarded(self._groups), torch.no_grad():
                meet(self._groups)
                for tensor in (*self.root.parameters(), *self.root.buffers()):
                    values = tensor.detach().to(self._device).contiguous()
                    broadcast(values, 0, self._groups.world)
                    tensor.data.copy_(values)
        self.drop()

    def make_whole(self, device: torch.device | None = None) -> None:
        """Gather all values on every rank, on `device` (default: the device of the run). All ranks must call it."""
        self.unlock()
        device = device or self._device
        if self._groups is None:
            return
        with guarded(self._groups):
            if self._borrowed is not None:
                self._borrowed.show("whole")
            meet(self._groups, inside_replica=True)
            for name, parameter in list(self.root.named_parameters()):
                home = self._groups.rank_of_stage(self._ownership.parameters[name][0])
                here = not parameter.is_meta
                values = parameter.data if here else torch.empty_like(parameter, device=self._device)
                broadcast(values, home, self._groups.pipeline)
                if not here:
                    fill_in(parameter, values.to(device))
                elif values.device != device:
                    gradient = parameter.grad
                    fill_in(parameter, values.to(device))
                    parameter.grad = None if gradient is None else gradient.to(device)
            self.gather_buffers(self._groups, device)
        self.whole = True

    def gather_buffers(self, groups: Groups, device: torch.device, names: Collection[str] | None = None) -> None:
        """Take each buffer, or those with `names`, from its home, where a step may have given it another shape."""
        own = {
            name: (tuple(buffer.shape), buffer.dtype)
            for name, buffer in self.root.named_buffers()
            if self._ownership.buffers.get(name) == self._stage and (names is None or name in names)
        }
        parts = gather_objects(own, groups, inside_replica=True)
        local = dict(self.root.named_buffers())
        for stage, forms in enumerate(parts):
            for name, (shape, dtype) in forms.items():
                buffer = local.get(name)
                if buffer is None or buffer.is_meta or tuple(buffer.shape) != shape or buffer.dtype != dtype:
                    buffer = torch.empty(shape, dtype=dtype, device=self._device)
                values = buffer.detach().contiguous()
                broadcast(values, groups.rank_of_stage(stage), groups.pipeline)
                if buffer is not local.get(name) or values.device != device:
                    self._set_buffer(name, values.to(device))
                elif stage != self._stage:
                    buffer.data.copy_(values)

    def _gather_gradients(self, groups: Groups) -> None:
        """Copy the gradients of all parameters from their homes."""
        mine = [name for name, p in self.root.named_parameters() if p.grad is not None]
        parts = gather_objects(mine, groups, inside_replica=True)
        for name, parameter in self.root.named_parameters():
            home = self._ownership.parameters[name][0]
            if name in parts[home]:
                values = torch.empty_like(parameter) if parameter.grad is None else parameter.grad
                broadcast(values, groups.rank_of_stage(home), groups.pipeline)
                parameter.grad = values

    @contextmanager
    def gathered(self, gradients: bool = False) -> Iterator[None]:
        """Hold all values (and gradients) on every rank inside. All ranks must enter it together.

        Each stage keeps the values that are written to its parameters inside, so every rank must write the same values.
        """
        if self.whole:
            yield
            return
        self.make_whole(torch.device("cpu") if self.gathers_on_host else None)
        if gradients and self._groups is not None:
            with guarded(self._groups):
                self._gather_gradients(self._groups)
        try:
            yield
        finally:
            self.drop()
            if self.gathers_on_host:
                move_module(self.root, self._device)  # the part of this stage

    @contextmanager
    def by_shapes(self) -> Iterator[None]:
        """Replace foreign tensors by plain meta tensors inside, to record a model that is whole on no rank."""
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

    # ---- refusal of a module in parts

    def lock(self, why: str) -> None:
        """Make `state_dict` and calls of modules without values raise, with the reason `why`, until `unlock`."""
        self.unlock()
        if self.whole:
            return
        text = (
            f"{type(self.root).__name__} is in parts, since {why}: this rank holds the values of stage {self._stage} only. Do "
            "one of these, on every rank: call `trainer.strategy.make_whole()` first, which gathers all values; or call "
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
        """Return the state dict of the module, with foreign tensors for those of other stages."""
        before, self.reading = self.reading, True
        try:
            return self.root.state_dict()
        finally:
            self.reading = before

    def full_state_dict(self) -> dict[str, Any]:
        """Return all parameters and buffers by full name on rank 0, and an empty dict elsewhere. Every rank must call it."""
        own = self.state_dict()
        groups = self._groups
        if groups is None:
            return own
        with guarded(groups):
            mine = self.homed_here(own)
            parts = exchange_objects(mine, groups, inside_replica=True, target=groups.rank_of_stage(0))
        if groups.rank != 0:
            return {}
        merged = {name: value for part in parts for name, value in part.items()}
        return type(own)((name, merged.get(name, value)) for name, value in own.items())

    def own_state_dict(self) -> dict[str, Any]:
        """Return the entries of the state dict whose home is this stage."""
        state = self.state_dict()
        return state if self._groups is None else self.homed_here(state)

    def homed_here(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the entries of a state dict whose home is this stage, with all names of tied parameters."""
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
        if self._stage == self._last:  # entries that are neither, such as persistent states of metrics
            tensors = {name for name, _ in self.root.named_parameters(remove_duplicate=False)}
            tensors |= {name for name, _ in self.root.named_buffers(remove_duplicate=False)}
            found.update({name: value for name, value in state.items() if name not in tensors})
        return found

    def load_full_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """Load the part of this stage from a state dict of the whole model."""
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
                f"unexpected {sorted(result.unexpected_keys)}. Load a state dict of this model, or use strict=False."
            )


class _Refusal:
    """A hook that raises when a module in parts is called, pickled or asked for its state dict."""

    def __init__(self, parts: Parts, text: str) -> None:
        self._parts, self._text = parts, text

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if not self._parts.reading:
            raise ForeignTensorError(self._text)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Refusal:
        return self

    def __reduce__(self) -> NoReturn:
        raise ForeignTensorError(self._text)
