"""Replay a finished recording on the example and hold it against what the model itself returned."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.fx as fx

from pipepart.capture import state
from pipepart.capture.emit import executable
from pipepart.capture.flops import FlopMode
from pipepart.capture.recording import OpMeta, Recording
from pipepart.capture.runs import copy_leaf
from pipepart.errors import CaptureError

__all__ = ["verify"]


class _Replay(fx.Interpreter):
    """Runs a graph node by node and remembers shape, dtype, requires_grad and FLOPs of each value."""

    def __init__(self, module: fx.GraphModule, counter: FlopMode | None):
        super().__init__(module, garbage_collect_values=True)
        self.seen: dict[str, Any] = {}
        self.flops: dict[str, int] = {}
        self.counter = counter

    def run_node(self, n: fx.Node) -> Any:
        before = self.counter.total if self.counter is not None else 0
        value = super().run_node(n)
        origin = n.meta.get("origin")
        if self.counter is not None and self.counter.total != before and origin is not None:
            self.flops[origin] = self.counter.total - before
        if origin is not None and isinstance(value, torch.Tensor):
            size = value.numel() * value.element_size()
            self.seen[origin] = (tuple(value.shape), value.dtype, size, value.requires_grad)
        return value


def verify(recording: Recording, leaves: Sequence[Any], expected: Sequence[Any], fake_mode: Any) -> None:
    """Raise a `CaptureError` if the recording does not compute what the model computed.

    `expected` are the flat outputs of the model, from the same random state. Fills in what the example's sizes are and
    cost: the shape of each op's value, and ``node.meta["flops"]``.
    """
    versions = {name: parameter._version for name, parameter in recording.root.named_parameters()}
    got, replay = _replayed(recording, leaves, fake_mode)
    changed = [name for name, p in recording.root.named_parameters() if p._version != versions.get(name)]
    for i, (value, wanted) in enumerate(zip(got, expected)):
        if isinstance(wanted, torch.Tensor):
            problem = _difference(value, wanted, fake_mode is not None)
            if problem:
                raise CaptureError(
                    f"{type(recording.root).__name__}: the recorded graph does not compute what the model computes: "
                    f"output {i} {problem}.\n{_likely(changed)}"
                )
    for node in recording.ops:
        node.meta["flops"] = replay.flops.get(node.name, 0)
        if node.op == "output" or node.name not in replay.seen:
            continue
        meta: OpMeta = node.meta["op"]
        shape, dtype, nbytes, requires_grad = replay.seen[node.name]
        if requires_grad != meta.requires_grad and meta.shape is not None and not meta.inplace:
            raise CaptureError(
                f"{type(recording.root).__name__}: op {node.name} (module {meta.module!r} at {meta.source}) "
                f"{'requires' if requires_grad else 'does not require'} a gradient in the recorded graph, and "
                f"{'does' if meta.requires_grad else 'does not'} in the model: it is run in another gradient mode"
            )
        if meta.shape is not None:
            node.meta["op"] = dataclasses.replace(meta, shape=shape, dtype=dtype, nbytes=nbytes)


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


def _replayed(recording: Recording, leaves: Sequence[Any], fake_mode: Any) -> tuple[Any, _Replay]:
    """Run the recording op by op. An op that cannot run where FLOPs are counted makes it run without."""
    body = executable(recording, depth=None)
    for counter in (FlopMode(), None):
        replay = _Replay(body, counter)
        try:
            with ExitStack() as stack:
                stack.enter_context(state.preserved(recording.root))
                stack.enter_context(torch.enable_grad())
                if fake_mode is not None:
                    stack.enter_context(fake_mode)
                if counter is not None:
                    stack.enter_context(counter)
                return replay.run(*(copy_leaf(leaf) for leaf in leaves)), replay
        except Exception as error:
            if counter is None or isinstance(error, CaptureError):
                raise
    raise AssertionError("unreachable")


def _difference(value: Any, wanted: torch.Tensor, fake: bool) -> str:
    if not isinstance(value, torch.Tensor):
        return f"is {type(value).__name__}, expected a tensor"
    if value.shape != wanted.shape or value.dtype != wanted.dtype:
        return f"is {value.dtype} {tuple(value.shape)}, expected {wanted.dtype} {tuple(wanted.shape)}"
    if fake or torch.equal(value, wanted):
        return ""
    if value.is_floating_point() or value.is_complex():
        tolerance = 1e-4 if value.dtype in (torch.float32, torch.float64, torch.complex64) else 2e-2
        if torch.allclose(value, wanted, rtol=tolerance, atol=tolerance, equal_nan=True):
            return ""
        worst = (value - wanted).abs().max().item()
        return f"differs by up to {worst:.3g}"
    return "has other values"
