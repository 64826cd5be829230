"""Measurement of times on a device, and of the time of a whole step, which does not change the state of the model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import fx, nn

from pipepart.devices import Stopwatch, computes_on_host
from pipepart.recording import Recording
from pipepart.recording.model_state.state import preserved
from pipepart.recording.op import has_op, op_of

__all__ = [
    "Context",
    "Timer",
    "device_under",
    "own_copy",
    "split_layer",
    "state_kept",
    "time_step",
    "typical",
    "whole_step",
]

_STEPS = (5, 100)  # least and most repeats of the whole step
_FEW_STEPS = (3, 50)  # the same for a check of an earlier measurement
_STEP_BUDGET = 1.5  # seconds for the whole step; the speed of a machine changes from moment to moment

Context = Callable[[], AbstractContextManager[Any]]


class Timer:
    """Seconds of work on a device.

    On the host the times are known at once. An accelerator marks them in its queue, and is waited for when they are read:
    a wait around each op would add the time in which its queue is empty.
    """

    def __init__(self, device: torch.device) -> None:
        self._watch, self._at_once = Stopwatch(device), computes_on_host(device)
        self._open: list[tuple[Sequence[list[float]], Any, Any]] = []

    def start(self) -> Any:
        """Return a mark at the start of a piece of work."""
        return self._watch.mark()

    def stop(self, started: Any, *lists: list[float]) -> None:
        """Append the seconds since `started` to each list, now or when they are read."""
        stopped = self._watch.mark()
        self._open.append((lists, started, stopped))
        if self._at_once:
            self.read()

    def read(self) -> None:
        """Append all times that are not in their lists yet."""
        for lists, started, stopped in self._open:
            seconds = self._watch.between(started, stopped)
            for one in lists:
                one.append(seconds)
        self._open.clear()

    def drop(self) -> None:
        """Forget the times that were not read, after a failure."""
        self._open.clear()


def device_under(values: Iterable[Any]) -> torch.device:
    """Return the device of the first tensor of an accelerator among these values, or of the first tensor; else the CPU."""
    found = [value.device for value in values if isinstance(value, torch.Tensor)]
    return next((device for device in found if not computes_on_host(device)), torch.device("cpu"))


def whole_step(recording: Recording, leaves: Sequence[Any], context: Context = nullcontext) -> tuple[float, float]:
    """Measure the seconds of the forward and of the backward of one micro-batch in a few steps; 0 if a step fails."""
    with state_kept(recording.root):
        module = recording.graph_module()
        try:
            return time_step(module, leaves, recording.loss_index, context, _FEW_STEPS, _STEP_BUDGET / 2)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a run reports the error itself, or does not encounter it
            return 0.0, 0.0


def time_step(
    module: fx.GraphModule,
    leaves: Sequence[Any],
    loss_index: int | None,
    context: Context,
    steps: tuple[int, int] = _STEPS,
    budget: float = _STEP_BUDGET,
) -> tuple[float, float]:
    """Measure the seconds of the forward and of the backward of the whole step."""
    forward: list[float] = []
    backward: list[float] = []
    parameters = [p for p in module.parameters() if p.requires_grad]
    copies = any(has_op(node) and op_of(node).inplace for node in module.graph.nodes)
    timer = Timer(device_under([*leaves, *parameters]))
    least, most = steps
    for repeat in range(most):
        if repeat == least:
            timer.read()
        if repeat >= least and (sum(forward) + sum(backward)) * repeat / len(forward) > budget:
            break
        given = [own_copy(leaf) for leaf in leaves] if copies else leaves  # each run starts from the same values
        with context():
            started = timer.start()
            outputs = module(*given)
            timer.stop(started, forward)
        if loss_index is not None and parameters:
            started = timer.start()
            torch.autograd.backward(outputs[loss_index], inputs=parameters)
            timer.stop(started, backward)
        del outputs
    timer.read()
    # The first step warms up: it allocates the memory that the others reuse.
    return _mean(forward[1:]), _mean(backward[1:])


def own_copy(leaf: Any) -> Any:
    """Return a leaf in memory of its own: an op may change it, and saving a part of a batch would count the whole batch."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def typical(seconds: Sequence[float]) -> float:
    """Return the lower quartile of measured times; 0 if there are none."""
    return sorted(seconds)[len(seconds) // 4] if seconds else 0.0


def _mean(seconds: Sequence[float]) -> float:
    """Return the mean without the slowest 5 %. A step includes the disturbances of a run, so a quartile would be too low."""
    kept = sorted(seconds)[: max(1, len(seconds) - -(-len(seconds) // 20))]
    return statistics.fmean(kept) if kept else 0.0


class _Two(torch.autograd.Function):
    """A linear layer as an autograd function in Python, like the layers whose backward runs in two halves."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient.mm(weight), gradient.t().mm(x)


def split_layer(rounds: int = 60) -> float:
    """Measure the additional seconds of a layer that is an autograd function in Python, on a layer with almost no work."""
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
    """Set all gradients to None, and restore them, buffers, attributes, hooks and the random state at the end."""
    with preserved(root):
        for parameter in root.parameters():
            parameter.grad = None
        yield
