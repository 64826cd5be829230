"""Record a whole step of a LightningModule: the loss, what it logs, and the counters it reads."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from pipepart.errors import CaptureError
from pipepart.recording.inputs import trees
from pipepart.recording.inputs.batching import Batching, first_in_result
from pipepart.recording.inputs.leaves import describe_leaf
from pipepart.recording.model_state.places import Place
from pipepart.recording.model_state.reads import active
from pipepart.recording.record import record_call
from pipepart.recording.recording import Input, Recording
from pipepart.recording.trace.runs import Call

__all__ = ["STEPS", "record_step"]

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_COUNTERS = ("global_step", "current_epoch")
_OF_THE_RANK = {"is_global_zero": True, "global_rank": 0, "local_rank": 0, "node_rank": 0}
"""A step runs once over all stages: it sees what it sees in one process."""


class _TrainerView:
    """Stands in for the trainer while a step is recorded: counters are inputs, the rest is read from the real one."""

    def __init__(self, trainer: Any, counters: dict[str, Any]):
        self.__dict__.update(_trainer=trainer, _counters=counters)

    def __getattr__(self, name: str) -> Any:
        if name in self._counters:
            return self._counters[name]
        if name in ("optimizers", "lr_scheduler_configs", "strategy"):
            raise CaptureError(
                f"the step reads trainer.{name}, which changes from step to step and is not part of the graph; "
                "to log the learning rate use lightning's LearningRateMonitor"
            )
        if self._trainer is None:
            raise CaptureError(
                f"the step reads trainer.{name}, and the module has no trainer yet; attach one, or record inside fit"
            )
        if name in _OF_THE_RANK:
            return _OF_THE_RANK[name]
        reads = active()
        return getattr(self._trainer, name) if reads is None else reads.of_trainer(self._trainer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise CaptureError(f"the step sets trainer.{name}; a recorded step has no such side effects")


def _refuse(what: str) -> Any:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise CaptureError(
            f"the step calls self.{what}: optimizers and schedulers are not part of a recorded step; return the loss "
            "and let the trainer optimize (to log the learning rate use lightning's LearningRateMonitor)"
        )

    return refused


@contextmanager
def _recording_view(module: nn.Module, counters: dict[str, Any], logs: list[Any]) -> Iterator[None]:
    """The module as its step sees it while it is recorded: symbolic counters, and logging that collects."""

    def log(name: str, value: Any, *args: Any, **options: Any) -> None:
        names = _LOG_POSITIONAL[: len(args)]
        logs.append((name, _logged(value), {**dict(zip(names, args)), **options}))

    def log_dict(dictionary: Any, *args: Any, **options: Any) -> None:
        names = _LOG_POSITIONAL[: len(args)]
        for name, value in dictionary.items():
            log(name, value, **{**dict(zip(names, args)), **options})

    view = _TrainerView(getattr(module, "_trainer", None), counters)
    members: dict[str, Any] = {name: property(partial(_read, counters, name)) for name in counters}
    members["trainer"] = property(lambda self: view)
    members["__module__"] = type(module).__module__
    members["__qualname__"] = type(module).__qualname__
    original = type(module)
    attributes = {
        "log": log,
        "log_dict": log_dict,
        **{name: _refuse(name) for name in _MANUAL},
    }
    module.__dict__.update(attributes)
    module.__class__ = type(original.__name__, (original,), members)
    try:
        yield
    finally:
        module.__class__ = original
        for name in attributes:
            module.__dict__.pop(name, None)


def _read(counters: dict[str, Any], name: str, module: nn.Module) -> Any:
    return counters[name]


_MANUAL = ("manual_backward", "optimizers", "lr_schedulers", "toggle_optimizer", "untoggle_optimizer")
_LOG_POSITIONAL = ("prog_bar", "logger", "on_step", "on_epoch")


def _logged(value: Any) -> Any:
    """What is logged: numbers and tensors; a tensor of one element is logged as it is."""
    return value.detach() if isinstance(value, torch.Tensor) and value.requires_grad else value


def record_step(
    module: nn.Module,
    step: str,
    batch: Any,
    *,
    batch_idx: int = 0,
    dataloader_idx: int | None = None,
    numbers: Sequence[Place] = (),
    batching: Batching | None = None,
    others: Sequence[Any] = (),
) -> Recording:
    """Record ``training_step`` (or another step) of a LightningModule on an example batch.

    The leaves of the batch are inputs, and so are the numbers ``batch_idx``, ``global_step``, ``current_epoch``,
    and those of the Python state at the places `numbers`. `batching` says which leaves hold the samples; `others` are
    further batches, where rows cannot be left out.
    """
    if step not in STEPS:
        raise CaptureError(f"record_step: unknown step {step!r}; expected one of {', '.join(STEPS)}")
    if getattr(module, "automatic_optimization", True) is False and step == "training_step":
        raise CaptureError(
            f"{type(module).__name__}: automatic_optimization=False; manual optimization cannot be recorded, "
            "since the step itself would run backward and the optimizer. Return the loss instead"
        )
    leaves, tree = trees.flatten(batch)
    leaves = leaves if batching is None else batching.first(leaves)
    paths = [f"batch{path}" for path in trees.leaf_paths(tree)]
    inputs = [describe_leaf(leaf, path, numbers=True) for leaf, path in zip(leaves, paths)]
    given_numbers: dict[str, int] = {"batch_idx": batch_idx}
    if dataloader_idx is not None:
        given_numbers["dataloader_idx"] = dataloader_idx
    given_numbers.update({name: _counter(module, name) for name in _COUNTERS})
    inputs += [Input(name, name, "number") for name in given_numbers]
    count = len(leaves)
    method = getattr(type(module), step)
    names = list(inspect.signature(method).parameters)[1:]

    def run(values: list[Any]) -> tuple[Any, list[Any]]:
        own = values[:count] if batching is None else batching.back(values[:count])
        given = trees.unflatten(own, tree, True)
        number = dict(zip(given_numbers, values[count:]))
        logs: list[Any] = []
        extra = {name: number[name] for name in ("batch_idx", "dataloader_idx") if name in names and name in number}
        position = [number["batch_idx"]] if len(names) > 1 and "batch_idx" not in names else []
        counters = {name: number[name] for name in _COUNTERS}
        with _recording_view(module, counters, logs):
            result = getattr(module, step)(given, *position, **extra)
        return first_in_result(result, values, batching, moved), logs

    moved: list[int] = []
    further = tuple(tuple(trees.leaves_of(other)) for other in others)
    example = (*leaves, *given_numbers.values())
    call = Call(module, run, example, tuple(inputs), tree, step, (method,), batching, further, moved)
    recording = record_call(call, None, numbers)
    if step == "training_step" and recording.loss_index is None:
        raise CaptureError(
            f"{type(module).__name__}.training_step returned no loss: expected a scalar tensor that requires grad, or a "
            f"dict with one under 'loss'; got {recording.output_tree}"
        )
    return recording


def _counter(module: nn.Module, name: str) -> int:
    try:
        value = getattr(module, name, 0)
        return int(value) if isinstance(value, (int, float)) else 0
    except Exception:
        return 0
