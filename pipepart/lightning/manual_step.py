"""Manual optimization while a step is recorded: the step acts on stand-ins, which note its acts in order.

A recorded step does not change the model. `manual_backward`, steps of optimizers and schedulers, `zero_grad` and clipping are
noted, and after recording the step is cut into segments between its backwards (`pipepart/recording/segments.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pipepart.errors import CaptureError
from pipepart.recording.inputs import trees
from pipepart.recording.recorded_run import moments
from pipepart.recording.recorded_run.symbols import StepNumber, is_tracked
from pipepart.recording.segments import Act

__all__ = ["ManualAct", "ManualNotes", "OptimizerOutline"]


@dataclass(frozen=True)
class OptimizerOutline:
    """The optimizers and schedulers of a module, by the parameters that they change."""

    parameters: tuple[tuple[str, ...], ...]
    """For each optimizer the names of its parameters."""
    schedulers: int
    """The number of learning rate schedulers."""
    repeating: frozenset[int] = frozenset()
    """Optimizers whose step may call its closure several times, or at another time than first."""


@dataclass(frozen=True)
class ManualAct:
    """One act of a step."""

    kind: str
    """"backward", "step", "zero_grad", "clip_gradients", "scheduler_step", "toggle" or "untoggle"."""
    index: int
    """The number of the loss, the optimizer or the scheduler."""
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def text(self) -> str:
        """The act in words."""
        words = {
            "backward": f"backward {self.index + 1} (manual_backward)",
            "scheduler_step": f"step of scheduler {self.index}",
        }
        return words.get(self.kind, f"{self.kind} of optimizer {self.index}")


@dataclass
class ManualNotes:
    """The acts of each run of a step that optimizes by itself."""

    name: str
    """The class of the module."""
    module: nn.Module
    outline: OptimizerOutline
    act: Callable[[str], None]
    """Called with each act in words: all ranks must note the same."""
    done: list[ManualAct] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    frozen: list[frozenset[str]] = field(default_factory=list)
    """The parameters that are frozen before each act, and after the last one, in the first run that has reached its end."""
    toggled: int | None = None
    steps: int = 0
    """The number of steps of optimizers so far."""
    _recorded: list[ManualAct] | None = None  # runs with batches of other sizes may fail on the way
    _frozen: list[frozenset[str]] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around one run of the step."""
        self.done, self.losses, self._frozen, self.toggled, self.steps = [], [], [frozenset()], None, 0
        with moments.counted():
            yield

    def members(self) -> dict[str, Any]:
        """The methods of the module that act, for the time of recording."""
        return {
            "manual_backward": self._backward,
            "optimizers": self._optimizers,
            "lr_schedulers": self._schedulers,
            "toggle_optimizer": self._toggle,
            "untoggle_optimizer": self._untoggle,
            "toggled_optimizer": self._toggled,
            "clip_gradients": self._clip,
        }

    def result(self, result: Any) -> dict[str, Any]:
        """The result of the recorded step: its losses and their sum, which the plan is made for, and the user's result."""
        if self.toggled is not None:
            raise CaptureError(
                f"{self.name}.training_step calls toggle_optimizer without untoggle_optimizer: the parameters of other "
                "optimizers would stay frozen. Call untoggle_optimizer before the step ends."
            )
        if self._recorded is None:
            self._recorded, self.frozen = self.done, self._frozen
        elif self._recorded != self.done:
            raise CaptureError(
                f"{self.name}.training_step calls its optimizers differently for batches of another size.\n  expected: "
                f"{[act.text for act in self._recorded]}\n  got: {[act.text for act in self.done]}\n"
                "  do: decide by batch_idx, global_step or attributes of the module"
            )
        leaves, tree = trees.flatten(result)
        own = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        made: dict[str, Any] = {"result": trees.unflatten(own, tree)}
        if self.losses:
            total = self.losses[0]
            for loss in self.losses[1:]:
                total = total + loss
            made = {"loss": total, "losses": tuple(self.losses), **made}
        return made

    @property
    def recorded(self) -> list[ManualAct]:
        """The acts of the first run that has reached its end."""
        assert self._recorded is not None
        return self._recorded

    @property
    def backwards(self) -> int:
        return sum(act.kind == "backward" for act in self.recorded)

    @property
    def acts(self) -> list[Act]:
        """The acts as the cut into segments takes them. The losses are the outputs after their sum."""
        return [
            Act(
                loss=1 + act.index if act.kind == "backward" else None,
                changes=frozenset(self.outline.parameters[act.index]) if act.kind == "step" else frozenset(),
                text=act.text,
            )
            for act in self.recorded
        ]

    # ---- called by the step

    def note(self, kind: str, index: int, **options: Any) -> None:
        """Note one act."""
        act = ManualAct(kind, index, tuple(sorted((key, self._fixed(value)) for key, value in options.items())))
        self.act(f"{act.text} {act.options}")
        self.done.append(act)
        everything = frozenset(name for names in self.outline.parameters for name in names)
        own = frozenset() if self.toggled is None else frozenset(self.outline.parameters[self.toggled])
        self._frozen.append(frozenset() if self.toggled is None else everything - own)
        moments.freeze(p for name, p in self.module.named_parameters() if name in self._frozen[-1])
        moments.advance()

    def _fixed(self, value: Any) -> Any:
        """A plain option of an act. One that follows a counter or the state of the module holds for its present value."""
        if isinstance(value, tuple):
            return tuple(self._fixed(item) for item in value)
        if isinstance(value, StepNumber):
            return value.concrete()
        if is_tracked(value) or isinstance(value, torch.Tensor):
            raise CaptureError(
                f"{self.name}.training_step calls an optimizer or clip_gradients with a value that it computes from the batch. "
                "Expected a number that does not depend on the batch."
            )
        return value

    def _backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        kept = {key: value for key, value in kwargs.items() if key != "retain_graph" and value not in (None, False)}
        if any(arg is not None for arg in args) or kept:
            raise CaptureError(
                f"{self.name}.training_step calls manual_backward(loss, ...) with {sorted(kept) or 'a gradient'}. A pipeline "
                "runs the backward of a scalar loss: multiply the loss instead, and leave create_graph and inputs out."
            )
        if not isinstance(loss, torch.Tensor) or loss.dim():
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise CaptureError(f"{self.name}.training_step: manual_backward expects a scalar tensor, got {got}.")
        self.losses.append(loss)
        self.note("backward", len(self.losses) - 1)

    def _optimizers(self, use_pl_optimizer: bool = True) -> Any:
        found = [_NotedOptimizer(self, index, use_pl_optimizer) for index in range(len(self.outline.parameters))]
        return found[0] if len(found) == 1 else found

    def _schedulers(self) -> Any:
        found = [_NotedScheduler(self, index) for index in range(self.outline.schedulers)]
        if len(found) > 1:
            return found
        return found[0] if found else None

    def _index(self, optimizer: Any) -> int:
        if not isinstance(optimizer, _NotedOptimizer):
            raise CaptureError(
                f"{self.name}.training_step passes a {type(optimizer).__name__} to a method that takes an optimizer. Take it "
                "from self.optimizers() in the step."
            )
        return optimizer.index

    def _toggle(self, optimizer: Any) -> None:
        if self.toggled is not None:
            raise CaptureError(
                f"{self.name}.training_step calls toggle_optimizer twice without untoggle_optimizer. Call "
                "untoggle_optimizer before the next toggle_optimizer."
            )
        self.toggled = self._index(optimizer)
        self.note("toggle", self.toggled)

    def _untoggle(self, optimizer: Any) -> None:
        index = self._index(optimizer)
        if self.toggled is not None and self.toggled != index:
            raise CaptureError(
                f"{self.name}.training_step calls untoggle_optimizer with optimizer {index}, but optimizer {self.toggled} is "
                "toggled. Pass the optimizer that was given to toggle_optimizer."
            )
        self.toggled = None
        self.note("untoggle", index)

    @contextmanager
    def _toggled(self, optimizer: Any) -> Iterator[None]:
        self._toggle(optimizer)
        yield
        self._untoggle(optimizer)

    def _clip(self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
        self.note("clip_gradients", self._index(optimizer), value=gradient_clip_val, algorithm=gradient_clip_algorithm)


class _NotedOptimizer:
    """Stands for an optimizer in a recorded step."""

    def __init__(self, notes: ManualNotes, index: int, counts: bool) -> None:
        """`counts`: a step counts as a global step, as those of Lightning's optimizers do."""
        self.__dict__.update(_notes=notes, index=index, _counts=counts)

    @property
    def optimizer(self) -> _NotedOptimizer:
        """The optimizer inside Lightning's one: its steps do not count."""
        return _NotedOptimizer(self._notes, self.index, False)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Run the closure and note the step."""
        if closure is not None and self.index in self._notes.outline.repeating:
            raise CaptureError(
                f"{self._notes.name}.training_step calls step(closure) of optimizer {self.index}, which may run the closure "
                "several times (LBFGS, SAM and others). The closure is recorded and run once: use an optimizer of torch.optim "
                "other than LBFGS, which works with automatic optimization."
            )
        answer = None if closure is None else closure()
        self._notes.note("step", self.index, counts=self._counts, given=tuple(sorted(kwargs.items())))
        self._notes.steps += self._counts
        return answer

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Note that gradients are set to zero."""
        self._notes.note("zero_grad", self.index, set_to_none=set_to_none)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Train only the parameters of this optimizer inside. Gradients are always averaged over replicas."""
        with self._notes._toggled(self):
            yield

    def __getattr__(self, name: str) -> Any:
        raise CaptureError(
            f"{self._notes.name}.training_step reads {name} of an optimizer, which changes from step to step and is not part "
            "of the recorded step. Do so in a hook (on_train_batch_start, on_before_optimizer_step); to log the learning rate "
            "use lightning's LearningRateMonitor."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        getattr(self, name)


class _NotedScheduler:
    """Stands for a learning rate scheduler in a recorded step."""

    def __init__(self, notes: ManualNotes, index: int) -> None:
        self._notes, self._index = notes, index

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Note the step."""
        if args or kwargs:
            raise CaptureError(
                f"{self._notes.name}.training_step calls step of a scheduler with a value. Call it in a hook "
                "(on_train_epoch_end), where the value is known on every rank."
            )
        self._notes.note("scheduler_step", self._index)

    def __getattr__(self, name: str) -> Any:
        raise CaptureError(
            f"{self._notes.name}.training_step reads {name} of a scheduler, which changes from step to step and is not part of "
            "the recorded step. Do so in a hook; to log the learning rate use lightning's LearningRateMonitor."
        )


def outline_of(module: nn.Module, optimizers: Sequence[Any], schedulers: int) -> OptimizerOutline:
    """Return the outline of optimizers that were made for a module that is whole."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = [[p for group in optimizer.param_groups for p in group["params"]] for optimizer in optimizers]
    for parameter in (p for group in groups for p in group if id(p) not in names):
        raise CaptureError(
            f"an optimizer has a parameter of shape {tuple(parameter.shape)} that is no parameter of the module. Register it."
        )
    repeating = [
        index
        for index, optimizer in enumerate(optimizers)
        if isinstance(optimizer, torch.optim.LBFGS) or not type(optimizer).__module__.startswith("torch.optim.")
    ]
    parameters = tuple(tuple(names[id(p)] for p in group) for group in groups)
    return OptimizerOutline(parameters, schedulers, frozenset(repeating))
