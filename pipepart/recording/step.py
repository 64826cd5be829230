"""Record a step: a call that takes one batch and some named numbers, and may produce extra outputs.

Frameworks whose modules have steps register how these are recorded. This module knows only batches, numbers and results,
and the names of the packages whose modules have steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch.nn as nn

from pipepart.recording.inputs import trees
from pipepart.recording.inputs.batching import Batching, first_in_result
from pipepart.recording.inputs.leaves import describe_leaf
from pipepart.recording.model_state.places import Place
from pipepart.recording.record import record_call
from pipepart.recording.recorded import ExtraOutput, Input, Recording
from pipepart.recording.recorded_run.runs import Call

__all__ = ["record_step", "register_steps", "step_recorder"]

StepRecorder = Callable[..., Recording]
"""Called as ``record(module, step, batch, batch_idx=, batching=, others=)``."""

_recorders: list[tuple[Callable[[nn.Module, str], bool], StepRecorder]] = []
_FRAMEWORKS = {"lightning": "pipepart.lightning", "pytorch_lightning": "pipepart.lightning"}
"""Packages of base classes of modules with steps, and the package that registers these steps when it is imported."""


def register_steps(has_step: Callable[[nn.Module, str], bool], record: StepRecorder) -> None:
    """Let `capture` record the methods for which ``has_step(module, name)`` holds with `record`."""
    _recorders.append((has_step, record))


def step_recorder(module: nn.Module, name: str) -> StepRecorder | None:
    """Return the registered function that records the method `name` of a module; None if it is not a step."""
    for package in {kind.__module__.partition(".")[0] for kind in type(module).__mro__} & _FRAMEWORKS.keys():
        import_module(_FRAMEWORKS[package])
    return next((record for has_step, record in _recorders if has_step(module, name)), None)


def record_step(
    root: nn.Module,
    step: str,
    run: Callable[[Any, dict[str, Any]], tuple[Any, list[ExtraOutput]]],
    batch: Any,
    given: Mapping[str, int],
    *,
    entry: Callable[..., Any],
    numbers: Sequence[Place] = (),
    batching: Batching | None = None,
    others: Sequence[Any] = (),
    converting: bool = False,
) -> Recording:
    """Record ``run(batch, given)``, which returns the result of the step and its extra outputs.

    Inputs of the graph are the leaves of the batch, the numbers `given` by name, and the numbers of the Python state at
    the places `numbers`. `entry` is the function of the user that `run` calls. `batching` tells which leaves hold the
    samples; `others` are further batches, for batches from which no rows can be removed. `converting` is that of
    `record_call`.
    """
    leaves, tree = trees.flatten(batch)
    leaves = leaves if batching is None else batching.first(leaves)
    paths = [f"batch{path}" for path in trees.leaf_paths(tree)]
    inputs = [describe_leaf(leaf, path, numbers=True) for leaf, path in zip(leaves, paths)]
    inputs += [Input(name, name, "number", value=value) for name, value in given.items()]
    count = len(leaves)
    moved: list[int] = []

    def run_flat(values: list[Any]) -> tuple[Any, list[ExtraOutput]]:
        own = values[:count] if batching is None else batching.back(values[:count])
        result, extras = run(trees.unflatten(own, tree, True), dict(zip(given, values[count:])))
        return first_in_result(result, values, batching, moved), extras

    further = tuple(tuple(trees.leaves_of(other)) for other in others)
    example = (*leaves, *given.values())
    call = Call(root, run_flat, example, tuple(inputs), tree, step, (entry,), batching, further, moved)
    return record_call(call, None, numbers, converting)
