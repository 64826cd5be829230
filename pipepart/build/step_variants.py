"""The recordings of one step, and the choice of the one that holds for a batch and the current Python state.

A step may do different things at different times (the end of a warm-up, a flag that a hook sets, another form of batch).
Each recording has guards. The first stage chooses a recording whose guards hold, or requests a new one. Numbers of the
Python state that have changed are inputs of the next recording, so that it holds for all their values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pipepart.build.foreign_collectives import collectives_refused
from pipepart.build.job import no_samples
from pipepart.errors import CaptureError
from pipepart.recording import Recording
from pipepart.recording.inputs import trees
from pipepart.recording.model_state.places import Change, Place
from pipepart.recording.recorded import StateChanged
from pipepart.runtime.failure import guarded
from pipepart.runtime.meeting import gather_objects, reduce_numbers
from pipepart.runtime.microbatch import fitting_sizes
from pipepart.runtime.stage import StageRuntime
from pipepart.samples.pieces import has_no_graphs

__all__ = ["MOST", "Variants", "empty_replica", "leaves_ahead", "leaves_of_series"]

MOST = 16
"""The number of recordings of one step that are kept."""
_STEPS = 3 * MOST
"""A run that needs `MOST` recordings within this number of steps is refused, since most of its steps would be recorded."""


@dataclass
class Variants:
    """The recordings of one step."""

    step: str
    names: list[str] = field(default_factory=list)
    """The names of the recordings, the last used first."""
    made: int = 0
    """The number of recordings so far."""
    numbers: dict[str, Place] = field(default_factory=dict)
    """Places of the Python state whose numbers are inputs of the next recordings."""
    _fixed: set[str] = field(default_factory=set)
    """Numbers that could not be recorded as inputs: a recording is valid for one value of each."""
    _new: set[str] = field(default_factory=set)
    _steps: int = 0
    _when: deque[int] = field(default_factory=lambda: deque(maxlen=MOST))
    _reasons: deque[str] = field(default_factory=lambda: deque(maxlen=MOST))

    def new_name(self) -> str:
        """Return the name of the next recording; the first one has the name of the step."""
        if len(self._when) == MOST and self._steps - self._when[0] <= _STEPS:
            reasons = "".join(f"  changed: {reason}\n" for reason in dict.fromkeys(self._reasons) if reason)
            raise CaptureError(
                f"{self.step} was recorded {MOST} times in the last {self._steps - self._when[0]} steps, and the next one "
                f"needs another recording.\n{reasons}"
                "  because: Python code branches on a value that changes often, so each recording holds for a few steps\n"
                "  do: use the value in arithmetic (multiply or add it instead of a branch), write the branch with tensors "
                "(torch.where), or keep the value in a buffer"
            )
        self._when.append(self._steps)
        self.made += 1
        return self.step if self.made == 1 else f"{self.step}#{self.made}"

    def record(self, make: Callable[[Sequence[Place]], Recording], runtime: StageRuntime) -> Recording:
        """Record with changing numbers as inputs, or with the newest of them fixed if that fails.

        All stages of a replica must call it and must record the same graph, which is checked.
        """
        with guarded(runtime.groups):
            with collectives_refused(runtime.root):
                try:
                    recording = make(list(self.numbers.values()))
                except (CaptureError, TypeError):
                    if not self._fix():
                        raise
                    recording = make(list(self.numbers.values()))
            _check_same(self.step, recording, runtime)
        return recording

    def added(self, name: str, runtime: StageRuntime) -> list[str]:
        """Add a new recording, and return the names of the recordings that were dropped for it."""
        self._new = set()
        self.names.insert(0, name)
        dropped = [old for old in self.names[MOST:] if old != self.step]
        self.names = [kept for kept in self.names if kept not in dropped]
        for old in dropped:
            runtime.drop(old)
        return dropped

    def _fix(self) -> bool:
        """Fix the numbers that were added last, since recording failed. Returns False if there were none."""
        self._fixed |= self._new
        for text in self._new:
            self.numbers.pop(text, None)
        had, self._new = bool(self._new), set()
        return had

    def choose(
        self, flatten: Callable[[Recording], list[Any]], runtime: StageRuntime, strict: bool = False, empty: int = 0
    ) -> tuple[str | None, list[Any] | None]:
        """Return the name of a recording that holds and, on the first stage, its leaves; None if a new one is needed.

        With `strict`, arguments that do not fit raise the error of the recording. `empty` is the result of
        `empty_replica`; all stages raise the same error if it is not 0.
        """
        self._steps += 1
        name: str | None = None
        leaves: list[Any] | None = None
        changes: list[Change] = []
        if runtime.is_first and not empty:
            with guarded(runtime.groups):
                name, leaves, changes = self._fitting(flatten, runtime, strict)
        moving = sorted({c.place.text for c in changes if c.is_number and c.place.text not in self._fixed})
        name, moving, reason, empty = runtime.from_first((name, moving, "; ".join(map(str, changes[:3])), empty))
        if empty:
            raise no_samples(self.step, runtime.groups, empty)
        if name is None:
            self._reasons.append(reason)
            self._move(moving, runtime)
        elif name != self.names[0]:
            self.names.remove(name)
            self.names.insert(0, name)
        return name, leaves

    def _fitting(
        self, flatten: Callable[[Recording], list[Any]], runtime: StageRuntime, strict: bool
    ) -> tuple[str | None, list[Any] | None, list[Change]]:
        found: list[Change] = []
        for name in self.names:
            recording = runtime.recording(name)
            changes = recording.guards.changes()
            if changes:
                found += changes
                continue
            try:
                leaves = flatten(recording)
            except StateChanged:
                continue
            except CaptureError:  # another structure, type or size
                if strict:
                    raise
                continue
            # The graph runs on micro-batches, so its guards are checked on them.
            if strict and not any(item.place is not None for item in recording.inputs):
                return name, leaves, []
            if fitting_sizes(recording, leaves, runtime.plan.microbatches) is not None:
                return name, leaves, []
        return None, None, found

    def _move(self, texts: Sequence[str], runtime: StageRuntime) -> None:
        """Make these numbers inputs of the next recording. Every rank uses the places that it has found itself."""
        here = {
            place.text: place
            for name in reversed(self.names)
            for place, _ in runtime.recording(name).guards.entries
            if place.text in texts
        }
        missing = [text for text in texts if text not in here]
        if missing:
            raise CaptureError(
                f"{self.step}: the step has read {missing[0]} on the first stage, but not on this stage, so the Python state "
                "differs between ranks. Set it in the same way on every rank."
            )
        self._new = set(texts) - set(self.numbers)
        self.numbers.update(here)


def empty_replica(batch: Any, name: str, runtime: StageRuntime, all_replicas: bool) -> int:
    """Return, on the first stage, the number (from 1) of a replica whose batch has no samples; 0 in all other cases.

    With `all_replicas`, the first stages of all replicas must call it together.
    """
    groups = runtime.groups
    if not runtime.is_first:
        return 0
    with guarded(groups):
        here = 0 if not _is_empty(batch, runtime.recording(name)) else 1 + (groups.replica if groups is not None else 0)
        if groups is None or groups.numbers is None or not all_replicas or runtime.parameters.loose is not None:
            return here
        number = torch.tensor([here])
        reduce_numbers(number, groups, groups.numbers)
    return int(number)


def _is_empty(batch: Any, recording: Recording) -> bool:
    """Return whether a batch has no samples, or nothing at all where the recording has tensors."""
    if has_no_graphs(batch):
        return True
    leaves, tree = trees.flatten(batch)
    batching, same = recording.batching, tree == recording.input_tree
    if same and batching is not None and batching.places:
        held = [(leaves[place], batching.dims[place] or 0) for place in batching.places]
        return all(isinstance(leaf, torch.Tensor) and leaf.dim() > dim and leaf.shape[dim] == 0 for leaf, dim in held)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not tensors:  # numbers and texts are a sample
        return all(leaf is None for leaf in leaves) and any(item.kind == "tensor" for item in recording.inputs)
    return all(tensor.numel() == 0 for tensor in tensors)


def leaves_ahead(
    flatten: Callable[[Recording], list[Any]], recording: Recording, microbatches: int
) -> list[Any] | None:
    """Return the leaves of a later batch, or None if the recording does not hold for it."""
    try:
        leaves = flatten(recording)
    except CaptureError:
        return None
    return leaves if fitting_sizes(recording, leaves, microbatches) is not None else None


def leaves_of_series(
    flattens: Sequence[Callable[[Recording], list[Any]]], recording: Recording, runtime: StageRuntime
) -> list[list[Any] | None]:
    """Return the leaves of the next batches of a series on the first stage.

    They are None from the first batch on for which the recording does not hold, and on other stages.
    """
    found: list[list[Any] | None] = []
    if runtime.is_first and not recording.guards.changes(first=True):
        for flatten in flattens:
            leaves = leaves_ahead(flatten, recording, runtime.plan.microbatches)
            if leaves is None:
                break
            found.append(leaves)
    return [*found, *[None] * (len(flattens) - len(found))]


def _check_same(step: str, recording: Recording, runtime: StageRuntime) -> None:
    """Check that all stages of a replica have recorded the same graph; name the value that differs between them."""
    if runtime.groups is None:
        return
    mine = (recording.hash, recording.guards.values())
    found = gather_objects(mine, runtime.groups, inside_replica=True)
    for stage, (digest, values) in enumerate(found):
        if digest != found[0][0]:
            first = found[0][1]
            differing = [
                f"{text} is {first.get(text, 'not read')} on stage 0 and {values.get(text, 'not read')} on stage {stage}"
                for text in {**first, **values}
                if first.get(text) != values.get(text)
            ]
            raise CaptureError(
                f"{step}: stage 0 and stage {stage} have recorded different graphs.\n"
                f"  because: {differing[0] if differing else 'the model or the step differs between the processes'}\n"
                "  do: set the state that the step reads in the same way on every rank"
            )
