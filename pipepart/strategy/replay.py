"""The effects of a recorded step, done again after each step with the values of the whole batch, on every rank.

Metrics are fed on the last stage, where their inputs come out; what they return goes to all stages. So every rank logs
the same, monitors decide the same, and nobody waits for a rank that took another branch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from lightning.pytorch import LightningModule
from torchmetrics import Metric, MetricCollection

from pipepart.capture import Recording, trees
from pipepart.errors import PipelineError
from pipepart.runtime import StageRuntime
from pipepart.runtime.failure import guarded
from pipepart.runtime.microbatch import MicrobatchSizes
from pipepart.runtime.program import StepResult
from pipepart.strategy.effects import Effect, Effects, outer_metrics
from pipepart.strategy.lazy import Later
from pipepart.strategy.metrics import on_this_rank

__all__ = ["merge_values", "replay"]


def replay(
    effects: Effects, result: StepResult, recording: Recording, module: LightningModule, runtime: StageRuntime
) -> Any:
    """Do all effects of a step that has run; returns what the step returned."""
    metrics = outer_metrics(module) if any(effect.on_metric for effect in effects.all) else {}
    values: dict[int, Any] = {}
    if effects.separate or metrics:
        with guarded(runtime.groups):
            values = _from_last_stage(effects, result, metrics, runtime)
    for effect in effects.all:
        _apply(effect, values, result, module, runtime)
    outputs = list(result.outputs)
    for index, later in effects.returned.items():
        outputs[index] = later.value(values)
    return recording.unflatten(outputs)


def _from_last_stage(
    effects: Effects, result: StepResult, metrics: Mapping[str, Any], runtime: StageRuntime
) -> dict[int, Any]:
    """Values of effects by ordinal: made on the last stage, the same everywhere."""
    message: tuple[str | None, dict[int, Any]] = (None, {})
    failure: Exception | None = None
    if runtime.is_last:
        try:
            with on_this_rank():
                message = (None, _values(effects, result, metrics))
        except Exception as error:
            failure = error
            message = (f"{type(error).__name__}: {error}", {})
    text, values = runtime.from_last(_moved(message, "cpu"))
    if failure is not None:
        raise failure
    if text is not None:
        raise PipelineError(f"the last stage failed after the step, while feeding metrics or merging values: {text}")
    return _moved(values, runtime.device)


def _moved(value: Any, device: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, value)


# ---- on the last stage


def _values(effects: Effects, result: StepResult, metrics: Mapping[str, Any]) -> dict[int, Any]:
    known: dict[int, Any] = {}
    for effect in effects.all:
        if effect.on_metric:
            known[effect.ordinal] = _feed(effect, metrics[effect.target], result, known)
        elif any(index in effects.separate for index in effect.outputs.values()):
            how = effect.options.get("reduce_fx", "mean") if effect.kind == "log" else "mean"
            known[effect.ordinal] = [
                merge_values(result.outputs[index], effect.laws[position], result.sizes, how)
                for position, index in sorted(effect.outputs.items())
            ]
    return known


def _feed(effect: Effect, metric: Any, result: StepResult, known: dict[int, Any]) -> Any:
    """Call the metric with the whole batch, or once for each micro-batch if its arguments cannot be put together."""
    call = getattr(metric, effect.kind)
    parts = {position: result.outputs[index] for position, index in effect.outputs.items()}
    if all(_can_merge(part, effect.laws[position], result.sizes) for position, part in parts.items()):
        whole = {p: merge_values(part, effect.laws[p], result.sizes, "mean") for p, part in parts.items()}
        args, kwargs = _arguments(effect, whole, known)
        return call(*args, **kwargs)
    answers = []
    for index in range(len(result.sizes)):
        args, kwargs = _arguments(effect, {p: part[index] for p, part in parts.items()}, known)
        answers.append(call(*args, **kwargs))
    if answers[0] is None:
        return None
    value = pytree.tree_map(lambda *v: merge_values(list(v), "constant", result.sizes, "mean"), *answers)
    if isinstance(metric, Metric):
        metric._forward_cache = value
    return value


def _arguments(effect: Effect, recorded: Mapping[int, Any], known: Mapping[int, Any]) -> tuple[Any, Any]:
    return trees.unflatten(_filled(effect, recorded, known), effect.tree)


def _filled(effect: Effect, recorded: Mapping[int, Any], known: Mapping[int, Any]) -> list[Any]:
    leaves = [leaf.value(known) if isinstance(leaf, Later) else leaf for leaf in effect.leaves]
    for position, value in recorded.items():
        leaves[position] = value
    return leaves


def _can_merge(values: Sequence[Any], law: str, sizes: MicrobatchSizes) -> bool:
    first = values[0]
    return not isinstance(first, torch.Tensor) or first.dim() == 0 or law == "batch" or _follows(values, sizes)


def _follows(values: Sequence[torch.Tensor], sizes: MicrobatchSizes) -> bool:
    """Dim 0 is the same multiple of the size of each micro-batch, for sizes that differ."""
    ratios = {value.shape[0] / size for value, size in zip(values, sizes.sizes)}
    return len(ratios) == 1 and len(set(sizes.sizes)) > 1


def merge_values(values: Sequence[Any], law: str, sizes: MicrobatchSizes, how: Any) -> Any:
    """One value for the batch: samples are put together, counts summed, other numbers averaged by size.

    `how` is the reduction that the user asked for when logging ("sum", "max", "min", or a mean).
    """
    first = values[0]
    if not isinstance(first, torch.Tensor):
        if isinstance(first, (int, float)) and not isinstance(first, bool):
            return sum(values) if law == "batch" else _mean(list(values), sizes)
        return values[-1]
    same = all(value.shape == first.shape for value in values)
    if first.dim() > 0 and (law == "batch" or _follows(values, sizes) or not same):
        return torch.cat(list(values))
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
    weights = torch.tensor(sizes.weights, dtype=stacked.dtype, device=stacked.device)
    return (stacked * weights.view(-1, *[1] * first.dim())).sum(0)


def _mean(values: list[Any], sizes: MicrobatchSizes) -> Any:
    if all(value == values[0] for value in values):
        return values[0]
    return sum(value * weight for value, weight in zip(values, sizes.weights))


# ---- on every rank


def _apply(
    effect: Effect, values: Mapping[int, Any], result: StepResult, module: LightningModule, runtime: StageRuntime
) -> None:
    if effect.on_metric:
        if effect.kind == "forward" and not runtime.is_last:
            _remember(module.get_submodule(effect.target), values[effect.ordinal])
        elif effect.kind == "reset" and not runtime.is_last:
            metric: Any = module.get_submodule(effect.target)
            metric.reset()
        return
    if effect.ordinal in values:
        recorded = dict(zip(sorted(effect.outputs), values[effect.ordinal]))
    else:
        recorded = {position: result.outputs[index] for position, index in effect.outputs.items()}
    value: Any = trees.unflatten(_filled(effect, recorded, values), effect.tree)
    if effect.kind == "log":
        options = dict(effect.options)
        path = options.pop("metric", None)
        if path is not None:
            value = module.get_submodule(path)
        module.log(effect.target, value, **{"batch_size": result.sizes.batch_size, **options})
    elif effect.kind == "set":
        setattr(module, effect.target, value)
    else:
        _put(module, effect, value)


def _put(module: LightningModule, effect: Effect, value: Any) -> None:
    first, *keys = effect.options["path"]
    container = getattr(module, first)
    for key in keys:
        container = container[key]
    if effect.kind == "append":
        container.append(value)
    elif effect.kind == "extend":
        container.extend(value)
    else:
        container[effect.options["key"]] = value


def _remember(metric: Any, value: Any) -> None:
    """What the metric returned for this batch, where it was not called: Lightning logs it from there."""
    if isinstance(metric, MetricCollection):
        for base in (str(key) for key in metric.keys(keep_base=True)):
            name = metric._set_name(base)
            if isinstance(value, dict) and name in value:
                metric[base]._forward_cache = value[name]
    else:
        metric._forward_cache = value
