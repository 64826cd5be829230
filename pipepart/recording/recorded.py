"""The recording: a flat fx graph over the user's parameters, with its inputs and outputs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn

from pipepart.errors import CaptureError
from pipepart.recording.fingerprint import describe
from pipepart.recording.inputs import trees
from pipepart.recording.inputs.batching import Batching
from pipepart.recording.model_state.places import Guards, Place, is_number, number_of
from pipepart.recording.op import op_of
from pipepart.recording.recorded_run.contexts import Checkpoint
from pipepart.recording.recorded_run.failures import GuardError, StateChanged
from pipepart.recording.recorded_run.intrinsics import failing_check

__all__ = ["ANY", "ExtraOutput", "GuardError", "Input", "Recording", "StateChanged"]


_CPU = torch.device("cpu")

ANY = type("ANY", (), {"__repr__": lambda self: "ANY"})()
"""The value of a constant that the recorded ops do not depend on."""


@dataclass(frozen=True)
class Input:
    """One leaf of the flattened arguments.

    `dynamic` tells for each dimension of a tensor whether runs at other sizes than that of the example gave the same graph.
    """

    name: str
    path: str
    kind: str
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    value: Any = None
    dynamic: tuple[bool, ...] = ()
    place: Place | None = None
    """The place of this number in the user's Python state; `value` is then its type. That of other numbers is that of the
    example."""


@dataclass(frozen=True, eq=False)
class ExtraOutput:
    """Named value that a recorded call produces in addition to its result.

    The function that is recorded returns its extra outputs with their values. In a `Recording`, the value of each run is
    the flat output `output`; if that is None, the value is the constant `value`.
    """

    name: str
    value: Any = None
    about: Mapping[str, Any] = field(default_factory=dict)
    """Data of the caller, by name. The recording carries it and reads only the names, for its hash."""
    output: int | None = None

    @property
    def is_module(self) -> bool:
        """Whether the value is a module, which is not an output of the graph."""
        return isinstance(self.value, nn.Module)


@dataclass(frozen=True, eq=False)
class Recording:
    """A model or a step as one recorded run: a graph of torch-level ops that shares the user's parameters."""

    graph: fx.Graph
    root: nn.Module
    inputs: tuple[Input, ...]
    loss_index: int | None
    extras: tuple[ExtraOutput, ...]
    training: bool
    constants: Mapping[str, Any]
    """Tensors and objects that the graph reads and that belong to no module, by their get_attr target."""
    input_tree: trees.Tree
    output_tree: trees.Tree
    step: str | None = None
    equal_sizes: tuple[tuple[tuple[int, int], ...], ...] = ()
    """Groups of (input, dimension) that had one size in all recorded runs and must keep one size."""
    leaves: tuple[str, ...] = ()
    """Modules of the user that are kept whole, since something inside could not be recorded."""
    notes: tuple[str, ...] = ()
    """Notes for the user: fixed values, modules that are kept whole with the reason, effects that are kept or dropped."""
    sizes: Mapping[tuple[tuple[int, int], ...], tuple[int | None, str]] = field(default_factory=dict)
    """For (input, dimension) pairs that were changed together: another size with the same graph, or None and the reason."""
    guards: Guards = field(default_factory=Guards)
    """The plain Python values that were read during recording; the recording holds while they are the same."""
    checkpoints: tuple[Checkpoint, ...] = ()
    """The regions of activation checkpointing; the regions of an op are positions here."""
    roots: tuple[int, ...] = ()
    """Outputs that receive gradients from outside, if the loss is computed elsewhere."""
    batching: Batching | None = None
    """Inputs that hold the samples (always along dimension 0 in the graph), if the caller has named them."""
    moved: tuple[int, ...] = ()
    """For each flat output of the result the dimension of its samples in the user's result; in the graph it is 0."""
    updates: Mapping[str, tuple[tuple[str, ...], str]] = field(default_factory=dict)
    """Modules that are kept whole and change their buffers, by path: the names of these, and the line of the call."""
    device: torch.device = _CPU
    """The device of the example. Tensors that the model made there are made on the device of each chunk."""

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> list[Any]:
        """Return the leaves of the arguments in the order of `inputs`; a `CaptureError` names the leaf that does not fit.

        For a step: ``flatten((batch,), {"batch_idx": 3})``; numbers that are not given are those of the example.
        """
        if self.step is not None:
            leaves, tree = trees.flatten(args[0] if len(args) == 1 else args)
            numbers = dict(kwargs or {}) if tree == self.input_tree else {}
            own = self.inputs[len(leaves) :]  # after the leaves of the batch, which may be a number itself
            extra = [spec for spec in own if spec.path == spec.name and spec.kind == "number"]
            leaves += [numbers.pop(spec.name, 0 if spec.value is None else spec.value) for spec in extra]
            if numbers:
                raise CaptureError(
                    f"{self.step}: unknown numbers {sorted(numbers)}; expected: {[spec.name for spec in extra]}"
                )
        else:
            leaves, tree = trees.flatten((tuple(args), dict(kwargs or {})))
        if self.batching is not None and tree == self.input_tree:
            leaves = self.batching.first(leaves)
        if tree != self.input_tree:
            raise CaptureError(
                f"the arguments of {self._what()} have another structure than the example it was recorded with.\n"
                f"  expected: {self.input_tree}\n  got:      {tree}\n"
                "  do: give batches of one structure, or record again with an example of the new one"
            )
        leaves += [self._state_number(spec) for spec in self.inputs[len(leaves) :] if spec.place is not None]
        for leaf, spec in zip(leaves, self.inputs):
            self._check(leaf, spec)
        for group in self.equal_sizes:
            (first, at), *rest = group
            for i, dim in rest:
                if leaves[i].shape[dim] != leaves[first].shape[at]:
                    raise GuardError(
                        f"arguments of {self._what()}: dimension {at} of {self.inputs[first].path} is "
                        f"{leaves[first].shape[at]} and dimension {dim} of {self.inputs[i].path} is "
                        f"{leaves[i].shape[dim]}; they were equal when it was recorded. Record again with such an example."
                    )
        return leaves

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Return the flat outputs (extra outputs are ignored) in the structure that the user's function returned."""
        if any(self.moved):
            dims = [*self.moved, *[0] * (len(leaves) - len(self.moved))]
            leaves = [v.movedim(0, d) if d and isinstance(v, torch.Tensor) else v for v, d in zip(leaves, dims)]
        return trees.unflatten(leaves, self.output_tree)

    def module(self) -> nn.Module:
        """Return the recording as a module that is called like the original, over the same parameters."""
        from pipepart.recording.execution.emit import executable
        from pipepart.recording.execution.ops_run import RecordedModule

        return RecordedModule(self, executable(self))

    def graph_module(self, device: torch.device | None = None) -> fx.GraphModule:
        """Return the whole graph as one executable module: flat inputs to a tuple of flat outputs.

        Each op is a node of it: regions of activation checkpointing are not run again in backward (those of `module`
        and of chunks are).
        """
        from pipepart.recording.execution.emit import executable

        return executable(self, device=device, depth=None)

    def stale(self, leaves: Sequence[Any]) -> str | None:
        """Return the reason why the graph is not valid for these leaves, from their sizes and numbers; None if it is.

        It computes only with Python numbers, so a caller can record again before anything runs.
        """
        return failing_check(self.graph, leaves)

    @cached_property
    def hash(self) -> str:
        """Hash of ops, constants and parameter shapes, equal in all processes and on all machines for one model and step."""
        return hashlib.sha256(describe(self).encode()).hexdigest()

    @cached_property
    def changed_inputs(self) -> frozenset[str]:
        """The names of the inputs whose memory the recorded ops change in place."""
        changed = {storage for node in self.graph.nodes for storage in op_of(node).mutates}
        nodes = (node for node in self.graph.nodes if node.op == "placeholder")
        return frozenset(
            spec.name for node, spec in zip(nodes, self.inputs) if not changed.isdisjoint(op_of(node).writes)
        )

    @property
    def ops(self) -> tuple[fx.Node, ...]:
        """The nodes that count as ops, in program order: all but the reads of parameters and buffers."""
        return tuple(node for node in self.graph.nodes if node.op != "get_attr")

    @property
    def draws(self) -> bool:
        """Whether some op draws random numbers."""
        return any(op_of(node).random for node in self.ops)

    def _what(self) -> str:
        name = type(self.root).__name__
        return f"{name}.{self.step}" if self.step else name

    def _state_number(self, spec: Input) -> int | float:
        assert spec.place is not None
        value = spec.place.read()
        if not is_number(value) or type(number_of(value)) is not spec.value:
            raise StateChanged(f"{spec.path}: expected a number of type {spec.value.__name__}, it is {value!r}")
        return number_of(value)

    def _check(self, leaf: Any, spec: Input) -> None:
        where = f"argument {spec.path} of {self._what()}"
        if spec.kind == "tensor":
            if not isinstance(leaf, torch.Tensor):
                raise CaptureError(f"{where}: expected a tensor, got {type(leaf).__name__}")
            shape = tuple(leaf.shape)
            assert spec.shape is not None
            if leaf.dtype != spec.dtype or len(shape) != len(spec.shape):
                raise CaptureError(
                    f"{where}: expected {spec.dtype} of {len(spec.shape)} dimensions, got {leaf.dtype} of shape {shape}"
                )
            for dim, (size, known, free) in enumerate(zip(shape, spec.shape, spec.dynamic)):
                if size != known and not free:
                    raise GuardError(
                        f"{where}: dimension {dim} was {known} when it was recorded and is {size}; the model does "
                        f"not compute the same ops for every size of it. Record again with an example of this size."
                    )
        elif spec.kind == "number":
            if not isinstance(leaf, (int, float)):
                raise CaptureError(f"{where}: expected a number, got {type(leaf).__name__}")
        elif spec.value is not ANY and not _same(leaf, spec.value):
            raise GuardError(
                f"{where}: the recording holds for {spec.value!r} only, got {leaf!r}. "
                "Pass the changing value as a tensor, or record again."
            )


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    try:
        return type(a) is type(b) and bool(a == b)
    except Exception:
        return False
