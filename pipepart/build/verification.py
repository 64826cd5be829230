"""The table of the option `verify`: one process on the whole batch, one process on micro-batches, and the pipeline.

All three run in eval mode (no dropout, BatchNorm with running statistics), so that they differ in the split of the batch
only. The first two need the whole model and run on every rank, before the model is divided into stages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from pipepart.build.batch_verdict import container_of
from pipepart.errors import CaptureError
from pipepart.recording import Recording
from pipepart.recording.model_state.state import is_abstract
from pipepart.runtime.failure import guarded
from pipepart.runtime.meeting import gather_objects
from pipepart.runtime.microbatch import Whole, merge_outputs, split_batch
from pipepart.runtime.program import StepRequest
from pipepart.runtime.stage import StageRuntime
from pipepart.samples.lockstep import evaluating
from pipepart.samples.pieces import Pieces

__all__ = ["Reference", "reference_of", "verification"]

Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Reference:
    """The results of one process on the whole batch and on micro-batches, or the reason for their absence."""

    whole: Sequence[Any] = ()
    parts: Sequence[Any] = ()
    """Flat outputs of micro-batches, averaged or concatenated."""
    whole_gradients: Mapping[str, torch.Tensor] | None = None
    parts_gradients: Mapping[str, torch.Tensor] | None = None
    microbatches: int = 1
    leaves: Sequence[Any] = ()
    """The leaves of the whole batch."""
    reason: str = ""
    """The reason why the step could not be run."""


def reference_of(
    recording: Recording,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    microbatches: int,
    context: Context = nullcontext,
    pieces: Pieces | None = None,
) -> Reference:
    """Run a recorded training step in this process, on the whole batch and on micro-batches.

    `pieces`: the way the batch is split as a container, if it is.
    """
    if is_abstract(recording.root, recording.device):
        return Reference(reason="the model is on the meta device, or does not fit on one device")
    try:
        leaves = recording.flatten(args, kwargs)
    except CaptureError as error:
        return Reference(reason=f"the recording does not hold for the whole batch ({str(error).splitlines()[0]})")
    stale = recording.stale(leaves)
    if stale is not None:
        return Reference(reason=f"the recording does not hold for the whole batch ({stale})")
    container = container_of(recording, args, kwargs, pieces)
    if container is not None:
        leaves = Whole(leaves, container.pieces, container.batch, container.flatten)
    split, sizes = split_batch(recording, leaves, microbatches)
    with evaluating(recording.root):
        whole, whole_gradients = _run(recording, [leaves], [1.0], context)
    with evaluating(recording.root):
        parts, parts_gradients = _run(recording, split, sizes.weights, context)
    return Reference(whole[0], merge_outputs(parts, sizes), whole_gradients, parts_gradients, len(sizes), leaves)


def verification(
    runtime: StageRuntime,
    reference: Reference,
    names: Mapping[int, str],
    separate: Collection[int] = (),
    context: Context = nullcontext,
) -> str:
    """Run the pipeline on the same batch and return the table, equal on all ranks. Every rank must call it.

    `names`: the names of outputs in the table; `separate`: outputs that the runtime does not merge.
    """
    if reference.reason:
        return f"verify     not possible: {reference.reason}"
    with evaluating(runtime.root):
        result = runtime.train(
            StepRequest(leaves=reference.leaves, outputs_everywhere=True, separate=separate, context=context)
        )
        gradients = runtime.parameters.take_gradients()
    rows: list[tuple[str, ...]] = [("", "whole batch", "micro-batches", "pipeline")]
    for index, name in names.items():
        if index in separate or not _is_number(reference.whole[index]):
            continue
        whole = float(reference.whole[index])
        others = [_against(float(values[index]), whole) for values in (reference.parts, result.outputs)]
        rows.append((name, f"{whole:.7g}", *others))
    assert reference.whole_gradients is not None and reference.parts_gradients is not None
    mine = (runtime.stage, len(gradients), *_worst(reference, gradients))
    everyone: list[Any] = [mine]
    if runtime.groups is not None:
        with guarded(runtime.groups):
            everyone = gather_objects(mine, runtime.groups)
    for stage in range(runtime.plan.stages):
        found = [row for row in everyone if row[0] == stage]
        parts, pipeline = (max((row[i] for row in found), key=lambda item: item[0]) for i in (2, 3))
        count = sum(row[1] for row in found) if runtime.parameters.divides_updates else found[0][1]
        rows.append((f"gradients of stage {stage}", f"{count} parameters", _named(parts), _named(pipeline)))
    title = f"one process and the pipeline on {reference.microbatches} micro-batches, dropout off"
    return f"verify     {title}\n" + "\n".join(_lines(rows))


def _run(
    recording: Recording, parts: Sequence[Sequence[Any]], weights: Sequence[float], context: Context
) -> tuple[list[tuple[Any, ...]], dict[str, torch.Tensor]]:
    module, outputs = recording.graph_module(), []
    trained = {name: p for name, p in recording.root.named_parameters() if p.requires_grad}
    total: dict[str, torch.Tensor] = {}
    for leaves, weight in zip(parts, weights):
        with torch.enable_grad(), context():
            values = module(*leaves)
        loss = values[recording.loss_index]
        found = torch.autograd.grad(loss, list(trained.values()), torch.full_like(loss, weight), allow_unused=True)
        for name, gradient in zip(trained, found):
            if gradient is not None:
                total[name] = total[name] + gradient if name in total else gradient
        outputs.append(tuple(v.detach() if isinstance(v, torch.Tensor) else v for v in values))
    return outputs, total


Worst = tuple[float, str]


def _worst(reference: Reference, gradients: Mapping[str, torch.Tensor]) -> tuple[Worst, Worst]:
    """Return the largest relative differences to the whole batch: of micro-batches, and of the pipeline."""
    whole, parts = reference.whole_gradients or {}, reference.parts_gradients or {}
    largest = max((float(gradient.abs().max()) for gradient in whole.values() if gradient.numel()), default=0.0)
    answers = []
    for others in (parts, gradients):
        worst = (0.0, "")
        for name in gradients:
            wanted = whole.get(name)
            if wanted is None or not wanted.numel() or name not in others:
                continue
            scale = max(float(wanted.abs().max()), 1e-6 * largest, 1e-30)
            worst = max(worst, (float((others[name] - wanted).abs().max()) / scale, name))
        answers.append(worst)
    return answers[0], answers[1]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def _against(value: float, whole: float) -> str:
    return f"{value:.7g} ({abs(value - whole) / max(abs(whole), 1e-30):.1e})"


def _named(worst: Worst) -> str:
    return f"{worst[0]:.1e} {worst[1]}" if worst[1] else "equal"


def _lines(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return [("           " + "  ".join(text.ljust(width) for text, width in zip(row, widths))).rstrip() for row in rows]
