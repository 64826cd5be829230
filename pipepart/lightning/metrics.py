"""torchmetrics in a pipeline: the state is on the last stage of each replica, the computed value is on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torchmetrics import Metric

from pipepart.errors import PipelineError
from pipepart.lightning.effects import outer_metrics
from pipepart.recording.inputs import trees
from pipepart.runtime import StageRuntime
from pipepart.runtime.failure import guarded

__all__ = ["ConnectedMetrics", "on_this_rank"]

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


class ConnectedMetrics:
    """The metrics of a module, made right on every rank. All ranks must compute them together, as in any distributed run."""

    def __init__(self, module: LightningModule, runtime: StageRuntime) -> None:
        self._runtime = runtime
        self._undo: list[Callable[[], None]] = []
        self._metrics: list[tuple[Metric, Callable[..., Any]]] = []
        groups = runtime.groups
        if groups is None:
            return
        for metric in outer_metrics(module).values():
            if not isinstance(metric, Metric):
                continue
            for part in _parts(metric):
                before = (part.process_group, part.distributed_available_fn)
                # Metrics gather over the world by default; the other stages of a replica have nothing to add.
                part.process_group = groups.copies
                part.distributed_available_fn = _yes if groups.copies is not None else _no
                self._undo.append(partial(_put_back, part, *before))
            self._metrics.append((metric, metric.compute))
            metric.compute = _shared_compute(metric.compute, runtime)  # type: ignore[method-assign]

    def release(self) -> None:
        """The metrics are as they were before."""
        self._own_compute()
        for step in reversed(self._undo):
            step()
        self._undo = []

    def rest(self) -> None:
        """The run is over: every rank gets the states, and computes for itself (with its copies in other replicas)."""
        with guarded(self._runtime.groups):
            for metric, _ in self._metrics:
                states = [_state_of(part) for part in _parts(metric)] if self._runtime.is_last else None
                states = self._runtime.from_last(trees.map_structure(_to_host, states))
                for part, state in zip(_parts(metric), states):
                    vars(part).update(state)
        self._own_compute()

    def _own_compute(self) -> None:
        for metric, own in self._metrics:
            metric.compute = own  # type: ignore[method-assign]
        self._metrics = []


def _parts(metric: Metric) -> list[Metric]:
    """A metric and those inside it (wrappers)."""
    return [part for part in metric.modules() if isinstance(part, Metric)]


def _state_of(metric: Metric) -> dict[str, Any]:
    names = (*metric._defaults, "_update_count", "_computed")
    return {name: getattr(metric, name) for name in names}


def _to_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


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
            sent = trees.moved(message, "cpu")
            text, value = runtime.from_last(sent)
            if failure is not None:
                raise failure
            if text is not None:
                raise PipelineError(f"the last stage could not compute a metric: {text}")
            return trees.moved(value, runtime.device)

    return compute
