"""Replay of a recorded graph op by op: shapes, FLOPs and, if asked for, all values that it computes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
import torch.fx as fx
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode

from pipepart.errors import CaptureError
from pipepart.recording.execution.emit import executable
from pipepart.recording.model_state import state
from pipepart.recording.op import where_is
from pipepart.recording.proof.blame import SeenValues
from pipepart.recording.proof.outcome import Outcome, backward_roots, outcome_of
from pipepart.recording.recorded import Recording
from pipepart.recording.recorded_run.runs import copy_leaf

__all__ = ["Replay", "replayed"]

aten: Any = torch.ops.aten


def _attention(query: Any, key: Any, value: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    count: Any = flop_counter.sdpa_flop_count
    return int(count(query.shape, key.shape, value.shape))


def _recurrent_layer(inputs: Any, weight: Any, recurrent: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    steps = inputs.numel() // inputs.shape[-1]
    return int(2 * steps * (weight.numel() + recurrent.numel()))


_FORMULAS: dict[Any, Any] = {
    **flop_counter.flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten.mkldnn_rnn_layer: _recurrent_layer,
}
"""Formulas of torch, and of ops for which it has none: fused attention and recurrent layers on the CPU."""


class _FlopMode(TorchDispatchMode):
    """Adds up the FLOPs of matrix products, convolutions and attention inside; all other ops count as 0.

    ``FlopCounterMode`` of torch gives the same numbers in twice the time, and adds hooks to all modules and tensors, so
    the replay would not be the graph that is to be proved.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = _FORMULAS.get(getattr(func, "_overloadpacket", None))
        if formula is None and torch.is_inference_mode_enabled():  # composite ops are not decomposed there
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        out = func(*args, **kwargs)
        if formula is not None:
            self.total += int(formula(*args, **kwargs, out_val=out))
        return out


class Replay(fx.Interpreter):
    """Runs a graph node by node and keeps shape, dtype, size, requires_grad and FLOPs of each value, by recorded op."""

    def __init__(self, module: fx.GraphModule, observed: SeenValues | None = None, counter: _FlopMode | None = None):
        super().__init__(module, garbage_collect_values=True)
        self.seen: dict[str, tuple[tuple[int, ...], torch.dtype, int, bool]] = {}
        self.flops: dict[str, int] = {}
        self.counter, self.observed = counter, observed
        self.running: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        before = self.counter.total if self.counter is not None else 0
        self.running = n
        value = super().run_node(n)
        origin = n.meta.get("origin")
        if origin is None:
            return value
        if self.counter is not None and self.counter.total != before:
            self.flops[origin] = self.counter.total - before
        if isinstance(value, torch.Tensor):
            size = value.numel() * value.element_size()
            self.seen[origin] = (tuple(value.shape), value.dtype, size, value.requires_grad)
            if self.observed is not None:
                self.observed.see(origin, value)
        return value


def replayed(
    recording: Recording, leaves: Sequence[Any], fake_mode: Any, backward: bool, observed: SeenValues | None = None
) -> tuple[Outcome, Replay]:
    """Run the recording op by op. If an op cannot run where FLOPs are counted, the recording runs without counting."""
    body = executable(recording, depth=None)
    for counter in (_FlopMode(), None) if observed is None else (None,):
        replay = Replay(body, observed, counter)
        with ExitStack() as stack:
            stack.enter_context(state.preserved(recording.root))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(fake_mode if fake_mode is not None else nullcontext())
            given = {spec.name: copy_leaf(leaf) for spec, leaf in zip(recording.inputs, leaves)}
            try:
                with counter if counter is not None else nullcontext():
                    values = replay.run(*given.values())
            except CaptureError:
                raise
            except Exception as error:
                if counter is None:
                    raise CaptureError(_failure(recording, replay.running, error)) from error
                continue
            if fake_mode is not None:
                return Outcome(list(values)), replay
            if observed is not None and backward:
                observed.backward(*backward_roots(values, recording.loss_index))
            retain = observed is not None
            return outcome_of(values, recording.loss_index, recording.root, given, backward, retain), replay
    raise AssertionError("unreachable")


def _failure(recording: Recording, node: fx.Node | None, error: Exception) -> str:
    where = f"op {node.meta.get('origin', node.name)} ({where_is(node)})" if node is not None else "its arguments"
    text = str(error).partition("\n\nWhile executing")[0]
    return (
        f"{type(recording.root).__name__}: the recorded graph fails on the example that it was recorded with, in {where}: "
        f"{type(error).__name__}: {text[:300]}\n  do: report it as a bug, with the op"
    )
