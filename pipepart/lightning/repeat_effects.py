"""Repeats the effects of a recorded step after each step, with the values of the whole batch, on every rank.

Metrics are fed on the last stage, where their inputs are computed; their values go to all stages. So every rank logs the
same values, monitors decide the same, and no rank waits for one that took another branch.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torchmetrics import Metric, MetricCollection

from pipepart.build.batch_verdict import SamplesMeet
from pipepart.errors import PipelineError
from pipepart.lightning.follows import Follows
from pipepart.lightning.metrics import Later, made_on_last_stage, on_this_rank
from pipepart.lightning.noted_effects import Effect, Effects
from pipepart.lightning.outward import OUTWARD, repeat_outward
from pipepart.lightning.watched_containers import container_at
from pipepart.recording import Recording
from pipepart.recording.inputs import trees
from pipepart.runtime import StageRuntime
from pipepart.runtime.failure import guarded
from pipepart.runtime.meeting import reduce_numbers
from pipepart.runtime.microbatch import MicrobatchSizes, add_up
from pipepart.runtime.program import StepResult

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

__all__ = ["merge_values", "repeat_effects", "values_made"]


def repeat_effects(
    effects: Effects, result: StepResult, recording: Recording, module: LightningModule, runtime: StageRuntime
) -> Any:
    """Repeat all effects of a step that has run, and return the result of the step."""
    metrics = effects.metrics(module)
    values: dict[int, Any] = dict(effects.constants)
    ahead = result.made is not None
    if ahead:
        values |= result.made
    elif effects.are_made:
        values |= made_on_last_stage(
            runtime,
            lambda: _values(effects, result, metrics),
            "the last stage failed after the step, while feeding metrics or merging values",
        )
    for effect in effects.all:
        _apply(
            effect, values, result, module, runtime, metrics, fed=runtime.is_last, shown=runtime.is_last and not ahead
        )
    outputs = list(result.outputs)
    for index, later in effects.returned.items():
        outputs[index] = later.value(values)
    return recording.unflatten(outputs)


# ---- on the last stage


def values_made(effects: Effects, module: LightningModule, result: StepResult) -> dict[int, Any] | None:
    """Feed the metrics and merge values, in a series as soon as the outputs of a batch are final."""
    return _values(effects, result, effects.metrics(module)) if effects.are_made else None


@on_this_rank()
def _values(effects: Effects, result: StepResult, metrics: Mapping[str, Any]) -> dict[int, Any]:
    """Values of effects by their numbers."""
    known: dict[int, Any] = dict(effects.constants)
    for effect in effects.all:
        if effect.on_metric:
            known[effect.ordinal] = _feed(effect, metrics[effect.target], result, known)
        elif effect.kind == "number" and effect.outputs:
            parts = {i: _whole(effect, i, result, effects.checked) for i in effect.outputs}
            known[effect.ordinal] = effect.options["compute"]({**dict(enumerate(effect.leaves)), **parts})
        elif any(index in effects.separate for index in effect.outputs.values()):
            known[effect.ordinal] = [_whole(effect, i, result, effects.checked) for i in sorted(effect.outputs)]
    return known


def _whole(effect: Effect, position: int, result: StepResult, checked: bool) -> Any:
    """The value of the whole batch. An error names the effect."""
    index = effect.outputs[position]
    values = result.outputs[index]
    how = effect.options.get("reduce_fx", "mean") if effect.kind == "log" else "mean"
    name = f"self.log({effect.target!r})" if effect.kind == "log" else effect.target
    name = f"self.{name}" if effect.kind == "set" else name
    name = "a Python number of the step" if effect.kind == "number" else name
    try:
        whole = merge_values(values, effect.follows[position], result.sizes, how, result.laws[index])
    except ValueError as error:
        shapes = [tuple(value.shape) if isinstance(value, torch.Tensor) else value for value in values]
        raise PipelineError(
            f"{name}: the values of {len(values)} micro-batches cannot be combined into that of the batch: {error}.\n"
            f"  expected: one dimension for the samples\n  got: tensors of the shapes {shapes}\n"
            "  do: store values of single samples and compute the rest in a hook, or use microbatches=1"
        ) from None
    if effect.kind != "log" and (guess := _guessed(values, whole, effect.follows[position], checked)):
        warnings.warn(
            f"{name}: the values of micro-batches differ, and how they make up that of the whole batch is not known. {guess}. "
            "If that is not intended, store values of single samples, or use microbatches=1.",
            SamplesMeet,
            stacklevel=2,
        )
    return whole


def _guessed(values: Sequence[Any], whole: Any, follows: Follows, checked: bool) -> str:
    """The way in which tensors that differ were combined, if it is not known to be right; empty otherwise."""
    if len(values) == 1 or not isinstance(whole, torch.Tensor) or not whole.dim():
        return ""
    if whole.shape != values[0].shape:
        known = follows.dims is not None or len({value.shape for value in values}) > 1
        return "" if known else "They were concatenated along the dimension that is as long as a micro-batch"
    if checked or all(torch.equal(value, values[0]) for value in values):
        return ""
    return "Their mean over the samples is stored (the sum of integers, the logical or of flags)"


def _feed(effect: Effect, metric: Any, result: StepResult, known: dict[int, Any]) -> Any:
    """Call the metric with the whole batch, or once for each micro-batch if its arguments cannot be combined."""
    parts = {position: result.outputs[index] for position, index in effect.outputs.items()}
    if all(_can_merge(part, effect.follows[position], result.sizes) for position, part in parts.items()):
        laws = {p: result.laws[index] for p, index in effect.outputs.items()}
        whole = {p: merge_values(part, effect.follows[p], result.sizes, "mean", laws[p]) for p, part in parts.items()}
        if effect.kind == "configure":
            return _configure(metric, effect, _filled(effect, whole, known))
        args, kwargs = _filled(effect, whole, known)
        return getattr(metric, effect.kind)(*args, **kwargs)
    if effect.kind == "configure":  # as after a run over the micro-batches one after the other
        return _configure(metric, effect, _filled(effect, {p: part[-1] for p, part in parts.items()}, known))
    answers, call = [], getattr(metric, effect.kind)
    for index in range(len(result.sizes)):
        args, kwargs = _filled(effect, {p: part[index if len(part) > 1 else 0] for p, part in parts.items()}, known)
        answers.append(call(*args, **kwargs))
    if answers[0] is None:
        return None
    flat, tree = [trees.leaves_of(answer) for answer in answers], trees.flatten(answers[0])[1]
    value = trees.unflatten([merge_values(v, Follows(()), result.sizes, "mean") for v in zip(*flat)], tree)
    if isinstance(metric, Metric):
        metric._forward_cache = value
    return value


def _configure(metric: Any, effect: Effect, value: Any) -> Any:
    """Set the attribute of a metric that the step has set."""
    setattr(metric, effect.options["name"], value)
    return value


def _filled(effect: Effect, computed: Mapping[int, Any], known: Mapping[int, Any]) -> Any:
    """The value of an effect from its constants, the values `known` of metrics, and the computed leaves by position."""
    leaves = [leaf.value(known) if isinstance(leaf, Later) else leaf for leaf in effect.leaves]
    for position, value in computed.items():
        leaves[position] = value
    return trees.unflatten(leaves, effect.tree)


def _can_merge(values: Sequence[Any], follows: Follows, sizes: MicrobatchSizes) -> bool:
    first = values[0]
    if len(values) == 1 or not isinstance(first, torch.Tensor) or first.dim() == 0:
        return True  # computed once for the whole batch, or a number
    try:
        return follows.dim([value.shape for value in values], sizes.sizes) is not None
    except ValueError:
        return False


def merge_values(
    values: Sequence[Any], follows: Follows, sizes: MicrobatchSizes, how: Any, law: str = "unknown"
) -> Any:
    """One value for the batch: samples are concatenated, counts summed, other numbers averaged by size.

    `law` is the known relation of the micro-batches to the batch ("sum", "mean" over samples). Otherwise `how` is the
    reduction that the user has set when logging ("sum", "max", "min", or a mean). ValueError: the dimension of the
    samples is ambiguous.
    """
    first = values[0]
    if len(values) == 1:  # one micro-batch, or computed once for the whole batch
        return first
    if law in ("sum", "mean") and isinstance(first, torch.Tensor):
        return add_up(values, None if law == "sum" else sizes.weights)
    if not isinstance(first, torch.Tensor):
        if isinstance(first, (int, float)) and not isinstance(first, bool):
            return _of_numbers(values, follows)
        return values[-1]
    dim = follows.dim([value.shape for value in values], sizes.sizes)
    if dim is not None:
        return torch.cat(list(values), dim)
    stacked = torch.stack([value.detach() for value in values])
    if how in ("max", torch.max, max):
        return stacked.amax(0)
    if how in ("min", torch.min, min):
        return stacked.amin(0)
    if first.dtype == torch.bool:
        return stacked.any(0)
    if how in ("sum", torch.sum, sum) or not (first.is_floating_point() or first.is_complex()):
        if first.dim() > 0 and bool((stacked == stacked[0]).all()):
            return first
        return stacked.sum(0)
    return add_up(values, sizes.weights)


def _of_numbers(values: Sequence[Any], follows: Follows) -> Any:
    """A size or an input of the whole batch."""
    if follows.counts:
        return sum(values)
    if any(value != values[0] for value in values):
        raise ValueError("it is neither equal in all micro-batches nor proportional to the number of samples")
    return values[0]


# ---- on every rank


def _apply(
    effect: Effect,
    values: Mapping[int, Any],
    result: StepResult,
    module: LightningModule,
    runtime: StageRuntime,
    metrics: Mapping[str, Any],
    fed: bool,
    shown: bool,
) -> None:
    """`fed`: metrics of this rank have seen the batch; `shown`: they have its value, and not that of a later batch."""
    if effect.kind == "number":
        return
    if effect.on_metric:
        if effect.kind == "forward" and not shown:
            _remember(metrics[effect.target], values[effect.ordinal])
        elif effect.kind == "reset" and not fed:
            metrics[effect.target].reset()
        elif effect.kind == "configure" and not fed:
            _configure(metrics[effect.target], effect, values[effect.ordinal])
        return
    if effect.ordinal in values:
        computed = dict(zip(sorted(effect.outputs), values[effect.ordinal]))
    else:
        computed = {position: result.outputs[index] for position, index in effect.outputs.items()}
    value: Any = _filled(effect, computed, values)
    if effect.kind == "log":
        options = dict(effect.options)
        path = options.pop("metric", None)
        if path is not None:
            value = metrics[path]
        averaged = options.get("sync_dist") and any(result.laws[i] == "sum" for i in effect.outputs.values())
        size = result.samples if averaged else result.sizes.batch_size
        given = options.pop("batch_size", size)
        if isinstance(given, Later):  # a number of the batch
            given = given.value(values)
            given = _of_all_replicas(given, runtime) if averaged else given
        module.log(effect.target, value, batch_size=given, **options)
    elif effect.kind == OUTWARD:
        repeat_outward(effect.options, value, module)
    elif effect.kind == "set":
        path, _, name = effect.target.rpartition(".")
        setattr(module.get_submodule(path), name, value)
    elif effect.kind == "trainer":
        setattr(module.trainer, effect.target, value)
    else:
        _put(module, effect, value)


def _of_all_replicas(number: Any, runtime: StageRuntime) -> Any:
    """The sum of a number over replicas."""
    groups = runtime.groups
    if groups is None or groups.copies is None:
        return number
    total = torch.tensor(float(number), dtype=torch.float64)
    with guarded(groups):
        reduce_numbers(total, groups, groups.copies, dist.ReduceOp.SUM)
    return total.item()


def _put(module: LightningModule, effect: Effect, value: Any) -> None:
    container = container_at(module, effect.options["path"])
    if effect.kind == "setitem":
        container[effect.options["key"]] = value
    elif effect.kind == "setdefault":
        container.setdefault(effect.options["key"], value)
    elif effect.kind == "count":
        container.update(value)
    elif effect.kind == "call":
        getattr(container, effect.options["key"])(*value)
    else:
        getattr(container, effect.kind)(value)


def _remember(metric: Any, value: Any) -> None:
    """Store the value of the metric for this batch on ranks that did not call the metric. Lightning logs the stored value."""
    if isinstance(metric, MetricCollection):
        for base in (str(key) for key in metric.keys(keep_base=True)):
            name = metric._set_name(base)
            if isinstance(value, dict) and name in value:
                metric[base]._forward_cache = value[name]
    else:
        metric._forward_cache = value
