"""Record a step of a LightningModule: its loss, its logged values, and the counters that it reads.

While a step is recorded, the module has other members: `log` and `log_dict` collect extra outputs, counters are inputs of
the graph, `trainer` is a view of the real one, and methods that belong to manual optimization raise.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from pipepart.errors import CaptureError, ConfigError
from pipepart.lightning.manual_step import ManualNotes, OptimizerOutline
from pipepart.lightning.outward import loggers_of
from pipepart.lightning.trainer_views import NeedsNumber, TrainerView
from pipepart.recording import ExtraOutput, Recording, record_step
from pipepart.recording.inputs.batching import Batching
from pipepart.recording.model_state.places import Place
from pipepart.recording.recorded_run.symbols import is_tracked, plain
from pipepart.recording.step import register_steps

__all__ = ["Logs", "detached", "record_lightning_step", "with_class"]

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_COUNTERS = ("global_step", "current_epoch")
_MANUAL = ("manual_backward", "toggle_optimizer", "untoggle_optimizer", "toggled_optimizer", "clip_gradients")
_LOG_ARGUMENTS = (
    "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist", "sync_dist_group",
    "add_dataloader_idx", "batch_size", "metric_attribute", "rank_zero_only",
)  # fmt: skip


class Logs:
    """Collects the logged values of each run of a step as extra outputs."""

    def __init__(self) -> None:
        self.extras: list[ExtraOutput] = []
        self.manual: ManualNotes | None = None
        """The acts of a step that optimizes by itself."""

    @contextmanager
    def running(self, module: nn.Module, batch: Any) -> Iterator[None]:
        """Around one run of the step on `batch`."""
        self.extras = []
        yield

    def log(self, name: str, value: Any, options: dict[str, Any]) -> None:
        """Called for ``self.log(name, value, **options)`` in the step; a `batch_size` may be a number of the batch."""
        if is_tracked(options.get("batch_size")):
            options = {key: option for key, option in options.items() if key != "batch_size"}
        self.extras.append(ExtraOutput(name, detached(value), options))

    def act(self, text: str) -> None:
        """Called for each act of a step that optimizes by itself."""
        self.extras.append(ExtraOutput(text, 0.0))

    def outward(self, name: str, value: Any, options: dict[str, Any]) -> None:
        """Called for each call of the step that reaches outside, such as ``print``; `value` are its arguments."""

    def said(self, name: str, value: Any, options: dict[str, Any]) -> None:
        """Called for each warning, and each line in a log of Python, that has no values of the batch."""

    def set_on_trainer(self, name: str, value: bool) -> None:
        """Called for ``self.trainer.should_stop = value`` in the step."""
        self.extras.append(ExtraOutput(f"trainer.{name} = {value}", 0.0))

    def returned(self, result: Any) -> Any:
        """The result of the step as the recording returns it."""
        return result


def record_lightning_step(
    module: nn.Module,
    step: str,
    batch: Any,
    *,
    batch_idx: int = 0,
    dataloader_idx: int | None = None,
    numbers: Sequence[Place] = (),
    batching: Batching | None = None,
    others: Sequence[Any] = (),
    logs: Logs | None = None,
    outline: OptimizerOutline | None = None,
    converting: bool = False,
) -> Recording:
    """Record ``training_step`` (or another step) of a LightningModule on an example batch.

    The leaves of the batch are inputs, and so are ``batch_idx``, ``dataloader_idx`` if it is given, ``global_step``,
    ``current_epoch``, and the numbers of the Python state at the places `numbers`. `batching` tells which leaves hold the
    samples; `others` are further batches, for batches from which no rows can be removed. `logs` makes the extra outputs.
    A training step with manual optimization needs the `outline` of its optimizers; its result is then that of
    `ManualNotes.result`.
    `converting`: follow the results of ``float`` and ``int``.
    """
    if step not in _STEPS:
        raise CaptureError(f"unknown step {step!r}: expected one of {', '.join(_STEPS)}")
    collected = Logs() if logs is None else logs
    notes: ManualNotes | None = None
    if getattr(module, "automatic_optimization", True) is False and step == "training_step":
        if outline is None:
            raise CaptureError(
                f"{type(module).__name__} has automatic_optimization=False: its step uses optimizers, which exist only inside "
                "the fit of a Trainer. Its plan is made there (PipelineStrategy), and it cannot be captured or planned alone."
            )
        notes = collected.manual = ManualNotes(type(module).__name__, module, outline, collected.act)
    given: dict[str, Any] = {"batch_idx": batch_idx}
    if dataloader_idx is not None:
        given["dataloader_idx"] = dataloader_idx
    given.update({name: _counter(module, name) for name in _COUNTERS})
    own_step = getattr(module, step)
    passed = [name for name in ("batch_idx", "dataloader_idx") if name in given and _takes(own_step, name)]

    skipped: list[bool] = []

    def run(own: Any, number: dict[str, Any]) -> tuple[Any, list[ExtraOutput]]:
        with _recording_view(module, number, collected, notes), collected.running(module, own):
            with nullcontext() if notes is None else notes.running():
                result = getattr(module, step)(own, *(number[name] for name in passed))
                skipped.append(result is None)
                result = collected.returned(result if notes is None else notes.result(result))
        return result, collected.extras

    while True:
        try:
            recording = record_step(
                module, step, run, batch, given, entry=own_step, numbers=numbers, batching=batching, others=others,
                converting=converting,
            )  # fmt: skip
            break
        except NeedsNumber as need:
            given[need.name] = need.value
    if step == "training_step" and recording.loss_index is None and notes is None and not skipped[-1]:
        raise CaptureError(
            f"{type(module).__name__}.training_step returned no loss: expected a scalar tensor that requires grad, a dict with "
            f"one under 'loss', or None to skip the batch; got {recording.output_tree}."
        )
    return recording


def _takes(step: Callable[..., Any], name: str) -> bool:
    """Whether a step takes `batch_idx` or `dataloader_idx`: by this name, as an argument of any name, or in `*args`."""
    spec = inspect.getfullargspec(getattr(step, "__wrapped__", step))
    position = 2 if name == "batch_idx" else 3  # after self and the batch
    return name in spec.args or spec.varargs is not None or len(spec.args) > position


def _counter(module: nn.Module, name: str) -> int:
    """The present value of a counter; 0 if the module has no such number, for example without a trainer."""
    try:
        value = getattr(module, name, 0)
    except Exception:
        return 0
    return int(value) if isinstance(value, (int, float)) else 0


def _has_step(module: nn.Module, name: str) -> bool:
    return name in _STEPS and hasattr(module, "automatic_optimization")


register_steps(_has_step, record_lightning_step)


@contextmanager
def with_class(thing: Any, members: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the class of `thing` is a subclass with these members, under the same name."""
    original = type(thing)
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    made = type(original.__name__, (original,), {**names, **members})
    had = set(vars(made))
    object.__setattr__(thing, "__class__", made)
    try:
        yield
    finally:
        object.__setattr__(thing, "__class__", original)
    more = sorted(name for name in set(vars(made)) - had if not name.startswith("__"))
    if more:
        raise ConfigError(
            f"the step sets {original.__name__}.{more[0]}, an attribute of the class. A recorded step does not run this Python "
            f"again: set it on the module itself (self.{more[0]}), which is repeated in each step, or in a hook."
        )


@contextmanager
def _recording_view(
    module: nn.Module, numbers: Mapping[str, Any], logs: Logs, notes: ManualNotes | None
) -> Iterator[None]:
    """Inside, the module has the members that its step sees while it is recorded."""

    def log(name: str, value: Any, *args: Any, **options: Any) -> None:
        options = {**dict(zip(_LOG_ARGUMENTS, args)), **options}
        logs.log(name, value, {k: o if k == "batch_size" else plain(o) for k, o in options.items()})

    def log_dict(dictionary: Any, *args: Any, **options: Any) -> None:
        for name, value in dictionary.items():
            log(name, value, *args, **options)

    def show(*args: Any, **kwargs: Any) -> None:
        logs.outward("self.print", (args, kwargs), {"how": "self.print"})

    now = numbers if notes is None else _Counters(numbers, notes)
    trainer = getattr(module, "_trainer", None)
    loggers = loggers_of(logs, trainer)
    view = TrainerView(trainer, now, _COUNTERS, loggers, show, logs.set_on_trainer)
    members: dict[str, Any] = {name: property(partial(_read, now, name)) for name in _COUNTERS}
    members["trainer"] = property(lambda self: view)
    members["logger"] = property(lambda self: next(iter(loggers), None))
    members["loggers"] = property(lambda self: list(loggers))
    reading = {"optimizers": view.optimizers_of_module, "lr_schedulers": view.lr_schedulers}
    automatic = {**{name: partial(_refuse, name) for name in _MANUAL}, **reading}
    attributes = {"log": log, "log_dict": log_dict, "print": show, **(automatic if notes is None else notes.members())}
    own = {name: value for name, value in vars(module).items() if name in attributes}  # of the user, on the object
    module.__dict__.update(attributes)
    try:
        with with_class(module, members):
            yield
    finally:
        for name in attributes:
            module.__dict__.pop(name, None)
        module.__dict__.update(own)


class _Counters(dict[str, Any]):
    """The counters of a step that optimizes by itself: each step of an optimizer counts as a global step."""

    def __init__(self, counters: Mapping[str, Any], notes: ManualNotes) -> None:
        super().__init__(counters)
        self._notes = notes

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        return value + self._notes.steps if name == "global_step" and self._notes.steps else value


def _read(counters: Mapping[str, Any], name: str, module: nn.Module) -> Any:
    return counters[name]


def _refuse(name: str, *args: Any, **kwargs: Any) -> Any:
    raise CaptureError(
        f"the step calls self.{name}: optimizers are not part of a recorded step; return the loss and let the trainer "
        "optimize"
    )


def detached(value: Any) -> Any:
    """A logged value without its gradient."""
    return value.detach() if isinstance(value, torch.Tensor) and value.requires_grad else value
