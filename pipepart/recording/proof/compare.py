"""Replay a finished recording on the example and prove it: outputs, buffers and gradients are those of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from pipepart.errors import CaptureError
from pipepart.recording.execution.emit import executable
from pipepart.recording.execution.flops import FlopMode
from pipepart.recording.model_state import state
from pipepart.recording.op import op_of, set_op, where_is
from pipepart.recording.proof.blame import Trace, TracedGraph, blame
from pipepart.recording.proof.outcome import Difference, Outcome, backward_roots, differences, outcome_of
from pipepart.recording.proof.rounding import beyond_rounding
from pipepart.recording.recording import Recording
from pipepart.recording.trace.runs import copy_leaf

__all__ = ["Rerun", "verify"]

_NOISE = 10.0
"""A model that differs from itself may differ from its recording by so many times as much,"""
_ROUNDING = 1e-2
"""and by no more than this: sums in another order, not other numbers."""


@dataclass(frozen=True)
class Rerun:
    """A second run of the model, op by op: what it gave, and its graph."""

    outcome: Outcome
    graph: TracedGraph


class _Replay(fx.Interpreter):
    """Runs a graph node by node and remembers shape, dtype, requires_grad and FLOPs of each value."""

    def __init__(self, module: fx.GraphModule, counter: FlopMode | None, trace: Trace | None):
        super().__init__(module, garbage_collect_values=True)
        self.seen: dict[str, Any] = {}
        self.flops: dict[str, int] = {}
        self.counter, self.trace = counter, trace
        self.running: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        before = self.counter.total if self.counter is not None else 0
        self.running = n
        value = super().run_node(n)
        origin = n.meta.get("origin")
        if self.counter is not None and self.counter.total != before and origin is not None:
            self.flops[origin] = self.counter.total - before
        if origin is not None and isinstance(value, torch.Tensor):
            size = value.numel() * value.element_size()
            self.seen[origin] = (tuple(value.shape), value.dtype, size, value.requires_grad)
            if self.trace is not None:
                self.trace.see(origin, value)
        return value


def verify(
    recording: Recording,
    leaves: Sequence[Any],
    expected: Outcome,
    fake_mode: Any,
    again: Callable[[Trace], Rerun | None],
    modes: bool = True,
) -> tuple[str, ...]:
    """Raise a `CaptureError` if the recording does not give what the model gave; returns notes on what was not proved.

    `expected` is what the model gave from the same random state, and `again` runs it once more, op by op, to find the
    op at fault. Fills in what the example's sizes are and cost: the shape of each op's value and its FLOPs.
    Without `modes`, it is not looked at which ops require a gradient: more do than in the model as it was recorded.
    """
    versions = {name: parameter._version for name, parameter in recording.root.named_parameters()}
    backward = expected.gradients is not None
    got, replay = _replayed(recording, leaves, fake_mode, backward)
    changed = [name for name, p in recording.root.named_parameters() if p._version != versions.get(name)]
    found = differences(got, expected, fake_mode is not None)
    notes = [f"gradients: not proved, since the backward of the model itself fails ({expected.failure})"]
    notes = notes if expected.failure else []
    if found or got.failure:
        if fake_mode is None:
            found, reason = _explained(recording, leaves, expected, got, found, again, changed)
        else:
            reason = ""
        if found or got.failure:
            raise CaptureError(_refusal(recording, expected, got, found, reason, changed))
        notes.append("the model differs from itself from run to run; the recording differs no more than that")
    if modes:
        _check_modes(recording, replay)
    _fill(recording, replay)
    return tuple(notes)


def _check_modes(recording: Recording, replay: _Replay) -> None:
    """Each op must be run with or without gradients, as in the model."""
    for node in recording.ops:
        if node.op == "output" or node.name not in replay.seen:
            continue
        meta = op_of(node)
        requires_grad = replay.seen[node.name][3]
        if requires_grad != meta.requires_grad and meta.shape is not None and not meta.inplace:
            raise CaptureError(
                f"{type(recording.root).__name__}: op {node.name} (module {meta.module!r} at {meta.source}) "
                f"{'requires' if requires_grad else 'does not require'} a gradient in the recorded graph, and "
                f"{'does' if meta.requires_grad else 'does not'} in the model: it is run in another gradient mode"
            )


def _fill(recording: Recording, replay: _Replay) -> None:
    """Sizes and FLOPs of the example."""
    for node in recording.ops:
        op = dataclasses.replace(op_of(node), flops=replay.flops.get(node.name, 0))
        if op.shape is not None and node.name in replay.seen:
            shape, dtype, size, _ = replay.seen[node.name]
            op = dataclasses.replace(op, shape=shape, dtype=dtype, output_bytes=size)
        set_op(node, op)


def _explained(
    recording: Recording,
    leaves: Sequence[Any],
    expected: Outcome,
    got: Outcome,
    found: list[Difference],
    again: Callable[[Trace], Rerun | None],
    changed: Sequence[str],
) -> tuple[list[Difference], str]:
    """What differs by more than the model does from itself, and which op is at fault.

    A model that has `changed` its parameters differs from itself for that reason: it is no excuse.
    """
    model, recorded = Trace(), Trace()
    rerun = again(model)
    if rerun is None:
        return found, ""
    own = {(item.kind, item.name): _NOISE * item.size for item in differences(rerun.outcome, expected)}
    limit = 0.0 if changed else _ROUNDING
    found = [item for item in found if item.size > min(limit, own.get((item.kind, item.name), 0.0))]
    backward = expected.gradients is not None
    found = beyond_rounding(found, got, recording.root, lambda: _replayed(recording, leaves, None, backward)[0])
    if not found and not got.failure:
        return [], ""
    _replayed(recording, leaves, None, backward, recorded)
    return found, blame(model, recorded, rerun.graph, recording.graph, recording.root, found)


def _refusal(
    recording: Recording,
    expected: Outcome,
    got: Outcome,
    found: list[Difference],
    reason: str,
    changed: Sequence[str],
) -> str:
    name = type(recording.root).__name__
    where = f"  where: {reason}\n" if reason else ""
    if not found:
        return f"{name}: the backward of the recorded graph fails, that of the model does not: {got.failure}\n{where}"
    first = found[0]
    if first.kind != "gradient of":
        return (
            f"{name}: the recorded graph does not compute what the model computes: {first}.\n{where}{_likely(changed)}"
        )
    count = sum(item.kind == "gradient of" for item in found)
    return (
        f"{name}: the recorded graph does not give the gradients of the model: {first}; {count} of "
        f"{len(expected.gradients or ())} gradients differ.\n{where}"
        "  likely: this op hides from the recorder how its gradient is computed\n"
        "  do: write it as a torch.autograd.Function or a submodule of its own, which is one op then"
    )


def _failed(recording: Recording, replay: _Replay, error: Exception) -> str:
    node = replay.running
    where = f"op {node.meta.get('origin', node.name)} ({where_is(node)})" if node is not None else "its arguments"
    text = str(error).partition("\n\nWhile executing")[0]
    return (
        f"{type(recording.root).__name__}: the recorded graph fails on the example that it was recorded with, in {where}: "
        f"{type(error).__name__}: {text[:300]}"
    )


def _likely(changed: Sequence[str]) -> str:
    if changed:
        names = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
        return (
            f"  because: the step changes parameters in place ({names}), which would happen once for each micro-batch\n"
            "  do: update them between steps (on_train_batch_end, or the callback WeightEMA)"
        )
    return (
        "  likely: the model draws random numbers outside torch, or keeps results of an earlier call in Python objects\n"
        "  do: make it a function of its inputs, its parameters and torch's random numbers"
    )


def _replayed(
    recording: Recording, leaves: Sequence[Any], fake_mode: Any, backward: bool, trace: Trace | None = None
) -> tuple[Outcome, _Replay]:
    """Run the recording op by op. An op that cannot run where FLOPs are counted makes it run without."""
    body = executable(recording, depth=None)
    for counter in (FlopMode(), None) if trace is None else (None,):
        replay = _Replay(body, counter, trace)
        with ExitStack() as stack:
            stack.enter_context(state.preserved(recording.root))
            stack.enter_context(torch.enable_grad())
            if fake_mode is not None:
                stack.enter_context(fake_mode)
            given = {spec.name: copy_leaf(leaf) for spec, leaf in zip(recording.inputs, leaves)}
            try:
                with counter if counter is not None else nullcontext():
                    values = replay.run(*given.values())
            except Exception as error:
                if isinstance(error, CaptureError):
                    raise
                if counter is None:
                    raise CaptureError(_failed(recording, replay, error)) from error
                continue
            if fake_mode is not None:
                return Outcome(list(values)), replay
            if trace is not None and backward:
                trace.backward(*backward_roots(values, recording.loss_index))
            outcome = outcome_of(
                values, recording.loss_index, recording.root, given, backward, retain=trace is not None
            )
            return outcome, replay
    raise AssertionError("unreachable")
