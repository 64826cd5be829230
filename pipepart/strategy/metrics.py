"""torchmetrics in a pipeline: the state is on the last stage of each replica, the computed value is on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from lightning.pytorch import LightningModule
from torchmetrics import Metric

from pipepart.errors import PipelineError
from pipepart.runtime import StageRuntime
from pipepart.runtime.failure import guarded
from pipepart.strategy.effects import outer_metrics

__all__ = ["connect_metrics", "on_this_rank"]

_alone = False


@contextmanager
def on_this_rank() -> Iterator[None]:
    """Inside, metrics compute for this rank alone (their forward does that for the value of a batch)."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


def connect_metrics(module: LightningModule, runtime: StageRuntime) -> Callable[[], None]:
    """Make `compute` of the module's metrics right on every rank. All ranks must call it together, as in any distributed
    run. Returns what undoes it."""
    undo: list[Callable[[], None]] = []
    groups = runtime.groups
    if groups is None:
        return lambda: None
    for metric in outer_metrics(module).values():
        if not isinstance(metric, Metric):
            continue
        for part in metric.modules():
            if isinstance(part, Metric):
                before = (part.process_group, part.distributed_available_fn)
                # Metrics gather over the world by default; the other stages of a replica have nothing to add.
                part.process_group = groups.copies
                part.distributed_available_fn = _yes if groups.copies is not None else _no
                undo.append(partial(_put_back, part, *before))
        own = metric.compute
        metric.compute = _shared_compute(own, runtime)  # type: ignore[method-assign]
        undo.append(partial(setattr, metric, "compute", own))

    def all_back() -> None:
        for step in reversed(undo):
            step()

    return all_back


def _yes() -> bool:
    return True


def _no() -> bool:
    return False


def _put_back(metric: Metric, process_group: Any, available: Any) -> None:
    metric.process_group, metric.distributed_available_fn = process_group, available


def _shared_compute(own: Callable[..., Any], runtime: StageRuntime) -> Callable[..., Any]:
    def compute(*args: Any, **kwargs: Any) -> Any:
        if _alone:
            return own(*args, **kwargs)
        message: tuple[str | None, Any] = (None, None)
        failure: Exception | None = None
        assert runtime.groups is not None
        with guarded(runtime.groups):
            if runtime.is_last:
                try:
                    message = (None, own(*args, **kwargs))
                except Exception as error:
                    failure, message = error, (f"{type(error).__name__}: {error}", None)
            sent = pytree.tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, message)
            text, value = runtime.from_last(sent)
            if failure is not None:
                raise failure
            if text is not None:
                raise PipelineError(f"the last stage could not compute a metric: {text}")
            return pytree.tree_map(lambda x: x.to(runtime.device) if isinstance(x, torch.Tensor) else x, value)

    return compute
