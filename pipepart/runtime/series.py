"""A series: batches of an evaluation that go through the pipeline one after the other, without a pause between them.

Three stages, batches of four micro-batches. Each batch alone drains the pipeline:

```
stage 0   0 0 0 0 . .   1 1 1 1 . .
stage 1   . 0 0 0 0 .   . 1 1 1 1 .
stage 2   . . 0 0 0 0   . . 1 1 1 1
```

In a series the pipeline stays full until its last batch:

```
stage 0   0 0 0 0 1 1 1 1 . .
stage 1   . 0 0 0 0 1 1 1 1 .
stage 2   . . 0 0 0 0 1 1 1 1
```
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import torch.fx as fx

from pipepart.graph import op_graph
from pipepart.recording import Recording
from pipepart.recording.recorded_run.intrinsics import set_attribute
from pipepart.runtime.chunked_step import ChunkedStep, StageInputs
from pipepart.runtime.executor import PreparedBatch
from pipepart.runtime.microbatch import MicrobatchSizes
from pipepart.samples.follow import outputs_of

__all__ = ["batches_together", "joined"]

_BUBBLE = 0.03
"""The share of a series in which devices may be idle while the pipeline fills and drains."""
_MOST = 32
"""The largest number of batches in a series."""
_BYTES = 1e9
"""The bytes of inputs, outputs and tensors between stages that a series may hold, if all of them waited at once."""
_OF_TIMEOUT = 0.1
"""The share of the time limit of transfers that a series may take, by the prediction of the plan."""


def batches_together(step: ChunkedStep, inputs: StageInputs) -> int:
    """Return the number of batches in a series of a recorded step: 1 if it cannot run in a series, or gains nothing.

    The forward of a batch in a series begins before the effects of the batches before it. So a step runs alone if it keeps
    attributes or reads numbers of the Python state. It runs alone, too, if its tail needs all micro-batches of a batch, if it
    draws from the generator of its stage, and if it needs numbers of all replicas, which would wait for each other.
    The number is equal on all ranks of a replica.
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
        return 1
    filled = (plan.stages - 1) * (1.0 - _BUBBLE) / _BUBBLE
    wanted = min(_MOST, math.ceil(filled / plan.microbatches))
    held = plan.microbatches * (_ends(recording) + sum(traffic.forward_bytes for traffic in plan.traffic))
    by_memory = int(_BYTES / held) if held else wanted
    by_time = int(_OF_TIMEOUT * options.timeout / plan.step_time) if plan.step_time > 0 else wanted
    return max(1, min(wanted, by_memory, by_time))


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
    )
