"""The batch check: the comparison of a whole batch with its micro-batches, before a run, and its messages."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import torch
import torch.fx as fx
from torch.nn.modules.batchnorm import _BatchNorm

from pipepart.errors import PlanError
from pipepart.recording import Recording
from pipepart.recording.inputs.batching import batching_of
from pipepart.recording.model_state.state import is_abstract
from pipepart.recording.op import op_of
from pipepart.recording.recorded import GuardError
from pipepart.samples.lockstep import Split
from pipepart.samples.mixing import Mixing, study
from pipepart.samples.pieces import Pieces
from pipepart.samples.tail import TailCut
from pipepart.samples.weigh import Weighed

__all__ = [
    "BatchCheck",
    "Container",
    "check_batch",
    "describe_check",
    "describe_leaves",
    "describe_norms",
    "leaves_without_samples",
]

_MOST_SAMPLES = 8
"""The largest number of samples of one part: enough to see that samples are combined, few enough to cost little."""
_MOST_TAKEN = 64
"""The same for samples that a step takes by their position."""
_AGAIN = 6
"""The number of further comparisons, each with other parameters and samples, of counts that may be right by chance."""


@dataclass(frozen=True)
class BatchCheck:
    """The result of a check. If `mixing` is None, the batch was not compared, for the given reason."""

    mixing: Mixing | None
    reason: str = ""


@dataclass(frozen=True)
class Container:
    """A batch that is split as a container."""

    pieces: Pieces
    batch: Any
    flatten: Callable[[Any], list[Any]]
    """The leaves of such a batch as the recording takes them."""

    def splits(self, microbatch_size: int) -> Iterator[Split] | None:
        """Return splits of some of the samples by the rule of the container, the best first; None if it is not split."""
        total = self.pieces.samples(self.batch)
        if total < 2 or microbatch_size >= total:
            return None
        few = -(-total // (2 * _MOST_SAMPLES - 1))
        whole = self.pieces.split(self.batch, few)[0].batch if few > 1 else self.batch
        found = [self.pieces.split(whole, count) for count in (2, 3, 4)]
        # Uneven parts come first, so that means and sums cannot be confused; of these, parts of one sample come last.
        found.sort(key=lambda parts: (len({p.samples for p in parts}) == 1, min(p.samples for p in parts) < 2))
        return (
            Split(self.flatten(whole), [self.flatten(p.batch) for p in parts], tuple(p.samples for p in parts))
            for parts in found
            if len(parts) > 1
        )


def check_batch(
    recording: Recording,
    leaves: Sequence[Any],
    microbatch_size: int,
    free: frozenset[int] = frozenset(),
    weighed: Weighed | None = None,
    container: Container | None = None,
) -> BatchCheck:
    """Compare the loss, the outputs and the gradients of a batch with those of two of its parts.

    `leaves` are those of a whole batch; the check takes samples from both sides of the first boundary between two
    micro-batches. The outputs `free` are not compared. With `weighed`, the recording runs with the weights of the batch.
    A batch that is split as a `container` is split by its own rule.
    """
    if is_abstract(recording.root, recording.device):
        why = "is on the meta device" if is_abstract(recording.root) else "does not fit on one device"
        return BatchCheck(None, f"the model {why}, so it cannot run before it is divided into stages")
    try:
        splits = _splits(recording, leaves, microbatch_size) if container is None else container.splits(microbatch_size)
        if splits is None:
            return BatchCheck(None)
        for split in splits:
            if _holds(recording, split):
                others = _others(recording, leaves, split.sizes) if container is None else repeat(split, _AGAIN)
                return _checked(recording, split, free, weighed, others)
    except GuardError as error:
        return BatchCheck(None, str(error).splitlines()[0])
    return BatchCheck(None, "the recording holds only for its own batch size, so the whole batch cannot run with it")


def _checked(
    recording: Recording, split: Split, free: frozenset[int], weighed: Weighed | None, others: Iterable[Split]
) -> BatchCheck:
    def completed(one: Split) -> Split:
        return replace(one if weighed is None else _with_numbers(one, weighed), free=free)

    def more() -> Iterator[Split]:
        for other in others:
            with suppress(Exception):  # the model may not have been recorded with the numbers of other samples
                yield completed(other)

    try:
        return BatchCheck(study(recording if weighed is None else weighed.recording, completed(split), more()))
    except Exception as error:
        return BatchCheck(None, f"{type(error).__name__} on {sum(split.sizes)} samples: {str(error)[:200]}")


def _holds(recording: Recording, split: Split) -> bool:
    return all(recording.stale(leaves) is None for leaves in (split.whole, *split.parts))


def _splits(recording: Recording, leaves: Sequence[Any], microbatch_size: int) -> list[Split] | None:
    """Return splits of samples around the first boundary of micro-batches, the best first; None if the batch is not split."""
    places = _places(recording, leaves)
    total = int(leaves[places[0]].shape[0]) if places else 0
    if total < 2 or microbatch_size >= total:
        return None
    most, taken = min(microbatch_size, _MOST_SAMPLES), min(_taken(recording, places[0]), _MOST_TAKEN)
    larger = []
    if 2 * most - 1 <= taken < total:
        count = min(taken // 2 + 2, (total + 1) // 2)
        larger = [(count, count - 1), (total - total // 2, total // 2)]
    # Uneven parts come first, so that means and sums cannot be confused.
    pairs = dict.fromkeys([*larger, (most, most - 1), (most, most), (2, 1), (1, 1)])
    fitting = [pair for pair in pairs if min(pair) > 0 and sum(pair) <= total]
    return [_neighbours(leaves, places, microbatch_size, pair) for pair in fitting]


def _taken(recording: Recording, place: int) -> int:
    """Return the largest number of rows that the step takes from one end of a tensor of samples (``x[:4]``), or 0.

    Parts of fewer samples would all be taken whole, so that the rows of all parts would look like those of the batch.
    """
    most, rows = 0, (recording.inputs[place].shape or ())[:1]
    for node in recording.graph.nodes:
        if node.op == "call_function" and node.target is operator.getitem and len(node.args) == 2:
            index: Any = node.args[1][0] if isinstance(node.args[1], tuple) and node.args[1] else node.args[1]
            source: Any = node.args[0]
            if not isinstance(source, fx.Node) or source.op == "get_attr":
                continue
            if isinstance(index, slice) and (op_of(source).shape or ())[:1] == rows:
                most = max([most, *(abs(end) for end in (index.start, index.stop) if type(end) is int)])
    return most


def _others(recording: Recording, leaves: Sequence[Any], sizes: Sequence[int]) -> Iterator[Split]:
    """Yield splits of other neighbouring samples of the batch."""
    places = _places(recording, leaves)
    total, most = int(leaves[places[0]].shape[0]), max(sizes)
    near = range(most // 2 + 1, most + 1)
    choices = [(start, (a, b)) for a in near for b in near for start in range(total - a - b + 1)]
    random.Random(0).shuffle(choices)
    found = 0
    for start, pair in choices[: 4 * _AGAIN] or [(0, (sizes[0], sizes[1]))] * _AGAIN:
        split = _neighbours(leaves, places, start + pair[0], pair)
        if found < _AGAIN and _holds(recording, split):
            found += 1
            yield split


def _neighbours(leaves: Sequence[Any], places: Sequence[int], boundary: int, sizes: tuple[int, int]) -> Split:
    """Return the split of the samples on both sides of a boundary; `places` are the leaves that hold samples."""
    total = int(leaves[places[0]].shape[0])
    start = min(max(0, boundary - sizes[0]), total - sum(sizes))
    held = [i in places and leaf.shape[0] == total for i, leaf in enumerate(leaves)]

    def rows(first: int, count: int) -> list[Any]:
        return [leaf.narrow(0, first, count) if samples else leaf for leaf, samples in zip(leaves, held)]

    return Split(rows(start, sum(sizes)), (rows(start, sizes[0]), rows(start + sizes[0], sizes[1])), sizes)


def _places(recording: Recording, leaves: Sequence[Any]) -> tuple[int, ...]:
    """Return the leaves that hold samples."""
    if recording.batching is not None:
        return recording.batching.places
    try:
        return batching_of(leaves, [item.path for item in recording.inputs]).places
    except PlanError:
        return ()


def _with_numbers(split: Split, weighed: Weighed) -> Split:
    """Return the split with further leaves: the numbers of its batch, from which the weights are made."""
    alone = weighed.numbers(split.whole, (sum(split.sizes),)).inputs.values()
    shared = weighed.numbers(split.whole, split.sizes).inputs.values()

    def given(leaves: Sequence[Any], numbers: Iterable[Any], part: int) -> list[Any]:
        return [*leaves, *(number[part] if isinstance(number, tuple) else number for number in numbers)]

    parts = tuple(given(part, shared, i) for i, part in enumerate(split.parts))
    sums = frozenset(i for i, law in enumerate(weighed.laws) if law == "sum")
    return replace(split, whole=given(split.whole, alone, 0), parts=parts, sums=sums)


def leaves_without_samples(recording: Recording, leaves: Sequence[Any]) -> list[str]:
    """Describe the tensors of a batch that do not hold its samples: every micro-batch gets them as they are."""
    places = _places(recording, leaves)
    return [
        f"{spec.path} {tuple(leaf.shape)}"
        for i, (spec, leaf) in enumerate(zip(recording.inputs, leaves))
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and i not in places
    ]


# ---- messages


def describe_check(
    recording: Recording, check: BatchCheck, cut: TailCut | None, refused: str, unsplit: Sequence[str] = ()
) -> str:
    """Return the message on a check: the op that combines samples, the difference, and the solution or what to do.

    The message is empty if micro-batches make up the whole batch. `unsplit` are leaves without samples.
    """
    mixing = check.mixing
    if mixing is None:
        return f"micro-batches were not compared with the whole batch: {check.reason}" if check.reason else ""
    if cut is not None and mixing.wrong and not cut.ops:
        return (
            f"{mixing.fault}: its value is not the mean over micro-batches, so it is merged by another rule at the end"
        )
    if cut is not None and mixing.wrong:
        ops = f"it and {len(cut.ops) - 1} other ops run" if len(cut.ops) > 1 else "it runs"
        return (
            f"{mixing.fault} combines samples of a batch: {ops} once per batch on the last stage, on the outputs of all "
            "micro-batches. Each replica does so for its own batch."
        )
    if cut is not None:
        return f"{', '.join(cut.buffers)}: updated once per batch, on the last stage"
    if mixing.same:
        return f"a buffer is updated once per micro-batch, not once per batch: {refused}" if refused else ""
    where = f"{mixing.fault} combines samples of a batch" if mixing.fault else "an op combines samples of a batch"
    lines = [f"{where}, so micro-batches do not train as the whole batch does: {_differences(recording, mixing)}"]
    if refused:
        lines.append(f"the op cannot run once per batch: {refused}")
    shapes = [spec.shape for spec in recording.inputs if spec.kind == "tensor" and spec.shape]
    if shapes and all(len(shape) == 1 for shape in shapes):
        lines.append(
            "All tensors of the batch have one dimension. If it holds packed tokens and not samples, micro-batches divide "
            "documents: use padded samples of shape (batch, length), with batch_dim=1 where the samples are not in "
            "dimension 0, a method `split(self, batch, n)` of the module that splits between documents, or microbatches=1."
        )
    if unsplit:
        lines.append(describe_leaves(unsplit))
    lines.append(
        "do: use microbatches=1, which trains as one process does, or a loss and layers that see one sample at a time"
    )
    return "\n".join(lines)


def _differences(recording: Recording, mixing: Mixing) -> str:
    found = []
    if mixing.loss is not None:
        whole, parts = mixing.loss.whole, mixing.loss.parts
        change = abs(parts - whole) / max(abs(whole), 1e-12)
        found.append(f"loss {parts:.6g} instead of {whole:.6g} ({change:.2g} relative)")
    if mixing.gradient_here is not None:
        worst = mixing.gradient_here
        found.append(f"gradients differ by up to {worst.relative:.2g} relative ({worst.parameter})")
    wrong = set(mixing.wrong) - {recording.loss_index}
    logged = [extra.name for extra in recording.extras if extra.output in wrong]
    if logged:
        found.append(f"logged: {', '.join(logged[:5])}")
    rest = {i: d for i, d in mixing.differs.items() if i != recording.loss_index and math.isfinite(d)}
    if rest and not logged:
        found.append(f"outputs {sorted(rest)} differ by up to {max(rest.values()):.2g} relative")
    return ", ".join(found) + " on this batch"


def describe_leaves(unsplit: Sequence[str]) -> str:
    """Return a note on leaves without samples; empty if there are none."""
    if not unsplit:
        return ""
    return (
        f"dimension 0 does not hold the samples, so every micro-batch gets the whole tensor: {', '.join(unsplit)}. If it "
        "holds samples along another dimension, set batch_dim=1 for all tensors, or batch_dim={path: 1} for one"
    )


def describe_norms(recording: Recording) -> str:
    """Return a note on BatchNorm layers, which use the statistics of a micro-batch; empty if there are none."""
    if not recording.training:
        return ""
    modules = dict(recording.root.named_modules())
    called = dict.fromkeys(
        str(node.target) if node.op == "call_module" else op_of(node).module
        for node in recording.graph.nodes
        if node.op == "call_module" or getattr(node.target, "__name__", "") == "batch_norm"
    )
    layers = [name for name in called if isinstance(modules.get(name), _BatchNorm) and modules[name].training]
    if not layers:
        return ""
    names = ", ".join(layers[:3]) + (f" and {len(layers) - 3} more" if len(layers) > 3 else "")
    return f"BatchNorm normalises each micro-batch by its own statistics: {names}"
