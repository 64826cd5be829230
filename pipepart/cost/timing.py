"""The time of a whole step, and the state of the model kept while it is run for a measurement."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import fx, nn

from pipepart.recording import Recording
from pipepart.recording.model_state.state import preserved
from pipepart.recording.op import has_op, op_of

__all__ = ["Context", "now", "own_copy", "split_layer", "state_kept", "time_step", "typical", "whole_step"]

_STEPS = (5, 100)  # of the whole step: at least, at most
_FEW_STEPS = (3, 50)  # to see whether what was measured before still holds
_STEP_BUDGET = 1.5  # seconds for the whole step; a machine is faster in one moment and slower in the next

Context = Callable[[], AbstractContextManager[Any]]


def whole_step(recording: Recording, leaves: Sequence[Any], context: Context = nullcontext) -> tuple[float, float]:
    """Seconds of the forward and of the backward of one micro-batch, measured quickly; 0 if it cannot be measured."""
    with state_kept(recording.root):
        module = recording.graph_module()
        try:
            return time_step(module, leaves, recording.loss_index, context, _FEW_STEPS, _STEP_BUDGET / 2)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a run shows it in its own words, or does not meet it
            return 0.0, 0.0


def time_step(
    module: fx.GraphModule,
    leaves: Sequence[Any],
    loss_index: int | None,
    context: Context,
    steps: tuple[int, int] = _STEPS,
    budget: float = _STEP_BUDGET,
) -> tuple[float, float]:
    """Seconds of the forward and the backward of the whole step."""
    forward: list[float] = []
    backward: list[float] = []
    parameters = [p for p in module.parameters() if p.requires_grad]
    copies = any(has_op(node) and op_of(node).inplace for node in module.graph.nodes)
    least, most = steps
    for repeat in range(most):
        if repeat >= least and sum(forward) + sum(backward) > budget:
            break
        given = [own_copy(leaf) for leaf in leaves] if copies else leaves  # each run starts from the same values
        with context():
            started = now()
            outputs = module(*given)
            forward.append(now() - started)
        if loss_index is not None and parameters:
            started = now()
            torch.autograd.backward(outputs[loss_index], inputs=parameters)
            backward.append(now() - started)
        del outputs
    # The first one warms up: it allocates what the others use again.
    return _mean(forward[1:]), _mean(backward[1:])


def own_copy(leaf: Any) -> Any:
    """A leaf in memory of its own: an op may change it, and a part of a batch would count as the whole where it is saved."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def typical(seconds: Sequence[float]) -> float:
    """The lower quartile."""
    return sorted(seconds)[len(seconds) // 4] if seconds else 0.0


def _mean(seconds: Sequence[float]) -> float:
    """Without the longest twentieth. What disturbs a run is in its steps, each of which is a sum of many actions: they
    take what the mean says, while the share of an op is best told without disturbance."""
    kept = sorted(seconds)[: max(1, len(seconds) - -(-len(seconds) // 20))]
    return statistics.fmean(kept) if kept else 0.0


def now() -> float:
    """The time when all that was asked of the device so far is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class _Two(torch.autograd.Function):
    """A linear layer as a split backward runs it: by a function written in Python."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient.mm(weight), gradient.t().mm(x)


def split_layer(rounds: int = 60) -> float:
    """What running a layer that way costs more than running it by torch alone, on a layer with next to no work."""
    x, weight = torch.ones(2, 4, requires_grad=True), torch.ones(4, 4, requires_grad=True)

    def one(call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> float:
        times = []
        for _ in range(rounds):
            started = time.perf_counter()
            out = call(x, weight)
            torch.autograd.grad(out, [x, weight], torch.ones_like(out))
            times.append(time.perf_counter() - started)
        return typical(times)

    with torch.enable_grad():
        return max(0.0, one(_Two.apply) - one(nn.functional.linear))


@contextmanager
def state_kept(root: nn.Module) -> Iterator[None]:
    """The model, its gradients and the random state are as before, whatever the ops did. Inside there are no gradients."""
    with preserved(root):
        for parameter in root.parameters():
            parameter.grad = None
        yield
