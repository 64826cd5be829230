"""The pace of an evaluation: how many batches run together, and how far stages run ahead of the results.

Three stages, batches of four micro-batches. Each batch alone drains the pipeline:

```
stage 0   0 0 0 0 . .   1 1 1 1 . .
stage 1   . 0 0 0 0 .   . 1 1 1 1 .
stage 2   . . 0 0 0 0   . . 1 1 1 1
```

In a series the pipeline stays full from the first batch to the last. Stage 0 takes the results of batch 0 when it has run batch
2 (`ahead` is 2); they are there by then, so that it does not wait:

```
stage 0   0 0 0 0 1 1 1 1 2 2 2 2 3 3 3 3
stage 1   . 0 0 0 0 1 1 1 1 2 2 2 2 3 3 3 3
stage 2   . . 0 0 0 0 1 1 1 1 2 2 2 2 3 3 3 3
```
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch.fx as fx

from pipepart.devices import computes_on_host
from pipepart.graph import op_graph
from pipepart.recording import Recording
from pipepart.recording.recorded_run.intrinsics import set_attribute
from pipepart.runtime.chunked_step import ChunkedStep, StageInputs
from pipepart.runtime.executor import PreparedBatch
from pipepart.runtime.microbatch import MicrobatchSizes
from pipepart.samples.follow import outputs_of

__all__ = ["Pace", "joined", "pace_of"]

_BUBBLE = 0.03
"""The share of a window in which devices may be idle while it fills and drains the pipeline."""
_MOST = 32
"""The largest number of batches in a window."""
_BYTES = 1e9
"""The bytes of inputs, outputs and tensors between stages that batches under way may hold, if all of them waited at once."""
_OF_TIMEOUT = 0.1
"""The share of the time limit of transfers that a window of several batches may take, by the prediction of the plan."""


@dataclass(frozen=True)
class Pace:
    """The batches of an evaluation that are under way at once. It is equal on all ranks of a replica."""

    window: int = 1
    """The batches that run as one, with one list of actions."""
    ahead: int = 0
    """The batches that run before the results of a batch are taken; 0: all stages meet after each window."""

    @property
    def in_series(self) -> bool:
        """Whether batches run without a pause between them."""
        return self.window > 1 or self.ahead > 0


def pace_of(step: ChunkedStep, inputs: StageInputs) -> Pace:
    """Return the pace of a recorded step: one batch after the other if it cannot run in a series, or gains nothing.

    The forward of a batch in a series begins before the effects of the batches before it. So a step runs alone if it keeps
    attributes or reads numbers of the Python state. It runs alone, too, if its tail needs all micro-batches of a batch, if it
    draws from the generator of its stage, and if it needs numbers of all replicas, which would wait for each other.

    A stage with one chunk goes on with the next batch by itself. A stage with several would let a later chunk of a batch wait
    for the next batch, so batches run as one there. Stages on accelerators meet after each window: their results go by
    collectives of the device.
    """
    plan, recording, options = inputs.plan, step.recording, inputs.options
    if (
        plan.stages == 1
        or recording.training
        or step.tail is not None
        or (recording.draws and options.randomness == "stage")
        or (plan.replicas > 1 and step.weighed.needs_totals(train=False))
        or any(item.place is not None for item in recording.inputs)
        or any(node.target is set_attribute for node in recording.graph.nodes)
    ):
        return Pace()
    count = plan.microbatches
    held = count * (_ends(recording) + sum(traffic.forward_bytes for traffic in plan.traffic))
    fits = int(_BYTES / held) if held else _MOST * _MOST
    meets, window = not computes_on_host(inputs.device), 1
    if meets or len(plan.placement) > plan.stages:
        filled = (plan.stages - 1) * (1.0 - _BUBBLE) / _BUBBLE
        by_time = int(_OF_TIMEOUT * options.timeout / plan.step_time) if plan.step_time > 0 else _MOST
        window = max(1, min(_MOST, math.ceil(filled / count), by_time, fits))
    if meets:
        return Pace(window)
    ahead = window * (1 + math.ceil((plan.stages - 1) / (count * window)))
    if ahead + window > fits and len(plan.placement) == plan.stages:
        return Pace(1, max(0, fits - 1))
    return Pace(window, ahead if ahead + window <= fits else 0)


def _ends(recording: Recording) -> int:
    """Return the bytes of the inputs and outputs of a micro-batch."""
    ops = op_graph(recording).ops
    sizes = {op.name: op.output_bytes for op in ops}
    ends = {op.name for op in ops if op.kind == "input"}
    ends |= {value.name for value in outputs_of(recording.graph) if isinstance(value, fx.Node)}
    return sum(sizes.get(name, 0) for name in ends)


def joined(batches: Sequence[PreparedBatch]) -> PreparedBatch:
    """Return batches as one, with the micro-batches of all of them in order."""
    if len(batches) == 1:
        return batches[0]
    numbers: dict[str, tuple[float, ...]] = {}
    for name in batches[0].numbers:
        each = ((batch.numbers[name], len(batch.sizes)) for batch in batches)
        numbers[name] = tuple(
            chain.from_iterable(value if isinstance(value, tuple) else (value,) * count for value, count in each)
        )
    parts = [batch.microbatches for batch in batches if batch.microbatches is not None]
    return PreparedBatch(
        MicrobatchSizes(tuple(chain.from_iterable(batch.sizes.sizes for batch in batches))),
        tuple(chain.from_iterable(batch.forms for batch in batches)),
        numbers,
        sum(batch.samples for batch in batches),
        None,
        None,
        list(chain.from_iterable(parts)) if parts else None,
        batches[0].compiled,
    )
