"""The parameters of one stage and their gradients: before, during and after a step."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from pipepart.planning.sync_mode import SyncMode
from pipepart.runtime.failure import guarded
from pipepart.runtime.foreign import ForeignTensor
from pipepart.runtime.gradients import GradientSync, clip_grad_norm, gradient_norm
from pipepart.runtime.mesh import Groups
from pipepart.runtime.parameter_hooks import hooked, hooks_aside, not_of_one_batch
from pipepart.runtime.parts import Ownership
from pipepart.runtime.sync import BorrowedParameters, LooseReplicas
from pipepart.runtime.sync.optimizer_steps import drop_states, follow_optimizers

__all__ = ["StageParameters", "StepGradients"]


class StepGradients:
    """The gradients while one training step runs: `.grad` has the new ones, those of earlier steps are set aside."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], before: Mapping[str, torch.Tensor]) -> None:
        self.parameters, self.before = parameters, before

    @torch.no_grad()
    def scale_earlier(self, factor: float) -> None:
        """Multiply the gradients of earlier batches of the same optimizer step, before new ones are added."""
        if factor != 1.0:
            unreduced = (p.grad for p in self.parameters.values() if p.grad is not None)
            for gradient in (*self.before.values(), *unreduced):
                gradient.mul_(factor)


class StageParameters:
    """The parameters that one stage holds. New gradients are kept apart from `.grad` until `hand_over`."""

    def __init__(
        self,
        root: nn.Module,
        ownership: Ownership,
        groups: Groups | None,
        device: torch.device,
        mode: SyncMode | None = None,
    ) -> None:
        """All ranks must call it together. `mode`: how replicas are kept in step (default: by the mean of gradients)."""
        self._root, self._ownership, self._groups, self._device = root, ownership, groups, device
        self.sync = GradientSync(ownership, groups, mode or SyncMode(), partial(_named, weakref.ref(self)))
        self.follows_optimizers = False
        """Whether a step of an optimizer is followed by what replicas exchange then."""
        self.stand_in: nn.Parameter | None = None
        """The parameter that an optimizer gets on a stage without parameters."""
        self.shows_gradients = False
        """Whether this rank sees the gradients of parameters that other replicas update, until the update."""
        follow_optimizers(self, root, follows=self.divides_updates or self.sync.loose is not None)
        self._fresh: dict[str, torch.Tensor] = {}
        """Reduced gradients of the last step."""
        self._unreduced: dict[str, torch.Tensor] = {}
        """Gradients of this rank alone, of steps that were not reduced."""

    def named(self) -> dict[str, nn.Parameter]:
        """Return the parameters of this stage by full name."""
        found = {name: module._parameters[key] for name, module, key in self._places}
        return {name: parameter for name, parameter in found.items() if parameter is not None}

    def of_model(self) -> dict[str, nn.Parameter]:
        """Return the parameters of all stages by name; those of other stages have no values here."""
        found = {name: module._parameters[key] for name, module, key in self._all_places}
        return {name: parameter for name, parameter in found.items() if parameter is not None}

    def versions(self) -> list[tuple[int, int]]:
        """Return numbers that change when a parameter of this stage is changed in place or replaced."""
        return [(id(parameter), parameter._version) for parameter in self.named().values()]

    @cached_property
    def _places(self) -> list[tuple[str, nn.Module, str]]:
        """The places of the parameters of this stage."""
        held = set(self._ownership.held_by(self._groups.stage)) if self._groups is not None else None
        return [place for place in self._all_places if held is None or place[0] in held]

    @cached_property
    def _all_places(self) -> list[tuple[str, nn.Module, str]]:
        """Name, module and key of each parameter. Every step needs them, and a walk through a deep tree is slow."""
        split_names = [(name, *name.rpartition(".")[::2]) for name, _ in self._root.named_parameters()]
        return [(name, self._root.get_submodule(path), key) for name, path, key in split_names]

    @contextmanager
    def step(self, reduce: bool) -> Iterator[StepGradients]:
        """Collect the gradients of the step inside; with `reduce`, they are reduced when the region ends."""
        borrowed = self.sync.borrowed
        if borrowed is not None:
            borrowed.open()
        parameters, unreduced = self.named(), self._unreduced
        grads = {name: parameter.grad for name, parameter in parameters.items()}
        before = {name: g for name, g in grads.items() if g is not None and g is not unreduced.get(name)}
        for name, parameter in parameters.items():
            parameter.grad = unreduced.pop(name, None)
        try:
            with hooks_aside(parameters) as hooks:
                if reduce:
                    self.sync.begin(parameters)
                elif hooks:
                    raise not_of_one_batch(next(iter(hooks)))
                yield StepGradients(parameters, before)
            made = {name: p.grad for name, p in parameters.items() if p.grad is not None}
            if reduce and hooks:
                with guarded(self._groups):
                    made = hooked(made, hooks)
            self._fresh, self._unreduced = (made, {}) if reduce else ({}, made)
        except BaseException:
            if borrowed is not None:
                borrowed.abandon()
            raise
        finally:
            for name, parameter in parameters.items():
                parameter.grad = before.get(name)
        if borrowed is not None:
            borrowed.rest()

    @torch.no_grad()
    def hand_over(self, show_own: bool = False) -> None:
        """Add the gradients of the last step to `.grad`, as a backward in one process would.

        With `show_own`, `.grad` shows the gradients of steps that were not reduced; they belong to this rank alone. A parameter
        whose values are on another replica has none.
        """
        parameters = self.named()
        if show_own:
            for name, gradient in self._unreduced.items():
                if not isinstance(parameters[name], ForeignTensor):
                    parameters[name].grad = gradient
        for name, gradient in self._fresh.items():
            parameter = parameters[name]
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._fresh = {}

    def take_gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients of the last step by name instead of handing them over."""
        taken, self._fresh, self._unreduced = {**self._unreduced, **self._fresh}, {}, {}
        return taken

    def clip_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
        """Clip gradients of `parameters` by their norm over all stages; parameters of other stages are left out."""
        wanted = {id(p) for p in parameters}
        clipped = [p for p in self.named().values() if id(p) in wanted]
        counted = [p for p in self._counted() if id(p) in wanted]
        with guarded(self._groups):
            return clip_grad_norm(counted, clipped, max_norm, self._with_gradients, self._device)

    def norm(self) -> torch.Tensor:
        """Return the 2-norm of all gradients of the model. Every stage must call it."""
        with guarded(self._groups):
            return gradient_norm(self._counted(), self._with_gradients, self._device)

    @property
    def _with_gradients(self) -> dist.ProcessGroup | None:
        """The ranks that have the gradients of the model together; None: this rank has all of them."""
        if self._groups is None:
            return None
        if self.sync.owners is not None:
            return self._groups.world
        return self._groups.pipeline if self._groups.mesh.stages > 1 else None

    def _counted(self) -> list[nn.Parameter]:
        """Return the parameters that this rank contributes to a sum over the model: those with their home here."""
        held = self.named()
        homed = set(held) if self._groups is None else set(self._ownership.homed_at(self._groups.stage))
        others = self.updated_elsewhere
        return [parameter for name, parameter in held.items() if name in homed and id(parameter) not in others]

    @property
    def combines(self) -> bool:
        """Whether this replica is one of several, so that its gradients are kept until they are combined once."""
        several = self._groups is not None and self._groups.mesh.replicas > 1
        return several or self.sync.replicas is not None

    # ---- updates

    @property
    def updated_elsewhere(self) -> set[int]:
        """The parameters of this stage that other replicas update, which have their optimizer states, by identity."""
        return self.sync.owners.elsewhere() if self.sync.owners is not None else set()

    @property
    def divides_updates(self) -> bool:
        """Whether the replicas of this job have different optimizer states."""
        return self.sync.owners is not None

    def show_gradients(self) -> None:
        """Give all replicas the gradients in `.grad` of the parameters that others update. All replicas must call it."""
        if self.sync.owners is not None:
            with guarded(self._groups):
                self.sync.owners.show_gradients()

    def hide_gradients(self) -> None:
        """Remove the gradients of parameters that other replicas update, so that optimizers leave them out here."""
        if self.sync.owners is not None:
            self.sync.owners.hide_gradients()

    @property
    def loose(self) -> LooseReplicas | None:
        """The exchange between replicas that make updates of their own; None if all replicas have equal parameters."""
        return self.sync.loose

    @property
    def borrowed(self) -> BorrowedParameters | None:
        """The parameters that replicas borrow from each other; None if each replica has all parameters of this stage."""
        return self.sync.borrowed

    @contextmanager
    def values_here(self) -> Iterator[None]:
        """Hold the values of all parameters of this stage inside, if replicas borrow them. All must enter together."""
        if self.sync.borrowed is None:
            yield
            return
        with guarded(self._groups), self.sync.borrowed.here():
            yield

    @contextmanager
    def mean_shown(self) -> Iterator[None]:
        """Hold the mean of replicas in the parameters inside, if they make updates of their own, and all that they borrow.

        All must enter together.
        """
        with self.values_here(), self._mean_of_loose():
            yield

    @contextmanager
    def _mean_of_loose(self) -> Iterator[None]:
        loose = self.sync.loose
        if loose is None or loose.shows_mean:
            yield
            return
        with guarded(self._groups):
            loose.show_mean()
        try:
            yield
        finally:
            loose.hide_mean()

    def show_mean(self, shows: bool) -> None:
        """Show the mean of replicas that make updates of their own in the parameters, or no longer. All must call it."""
        if self.sync.loose is not None:
            with guarded(self._groups):
                self.sync.loose.show_mean() if shows else self.sync.loose.hide_mean()

    def hold_all(self, holds: bool) -> None:
        """Hold the values of all parameters that replicas borrow during an evaluation, or no longer. All must call it."""
        if self.sync.borrowed is not None:
            with guarded(self._groups):
                self.sync.borrowed.show("evaluation") if holds else self.sync.borrowed.hide("evaluation")

    def settle(self) -> None:
        """Prepare for a point at which replicas wait for each other. All must call it."""
        if self.sync.loose is not None:
            with guarded(self._groups):
                self.sync.loose.settle()

    def average(self) -> None:
        """Give all replicas the mean of their parameters, if they make updates of their own. All must call it."""
        if self.sync.loose is not None:
            with guarded(self._groups):
                self.sync.loose.average()

    def before_update(self, optimizer: Optimizer) -> None:
        """Note that an optimizer is about to change parameters."""
        if self.sync.loose is not None and self._updates_model(optimizer):
            self.sync.loose.before_update(p for group in optimizer.param_groups for p in group["params"])

    def after_update(self, optimizer: Optimizer) -> None:
        """Exchange what an optimizer has changed with other replicas. All replicas must call it."""
        owners, loose = self.sync.owners, self.sync.loose
        if loose is not None and self._updates_model(optimizer):
            with guarded(self._groups):
                loose.after_update(p for group in optimizer.param_groups for p in group["params"])
        if owners is not None and self.follows_optimizers:
            with guarded(self._groups):
                owners.send_parameters(p for group in optimizer.param_groups for p in group["params"])
            drop_states(optimizer, owners.elsewhere())

    def _updates_model(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer is followed: it has parameters of the model, or stands for those of this stage."""
        if not self.follows_optimizers:
            return False
        known = {id(p) for p in (*self.of_model().values(), self.stand_in) if p is not None}
        return any(id(p) in known for group in optimizer.param_groups for p in group["params"])


def _named(reference: weakref.ref[StageParameters], of_model: bool = False) -> Mapping[str, nn.Parameter]:
    """Return the parameters of a stage that is not kept alive by this; with `of_model`, those of all stages."""
    living = reference()
    if living is None:
        return {}
    return living.of_model() if of_model else living.named()
