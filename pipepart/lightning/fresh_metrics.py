"""A metric whose value a step computes with, such as a loss: the value of the batch alone is computed by ops of the graph.

A copy of the metric starts from its default state in each run of the step, so its ops are recorded like those of any loss.
The metric itself is fed after the step, as all metrics are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torchmetrics import Metric

__all__ = ["NOT_FRESH", "FreshMetric", "names_of_all"]

NOT_FRESH: Any = object()
"""Instead of a value that depends on earlier batches."""


@cache
def names_of_all() -> frozenset[str]:
    """The attributes that torchmetrics itself keeps in every metric, and methods that a recording replaces."""

    class Plain(Metric):
        def update(self) -> None: ...

        def compute(self) -> None: ...

    return frozenset((*vars(Plain()), "update", "compute", "reset", "forward"))


class FreshMetric:
    """A copy of a metric that sees only the batch of one run of a step."""

    def __init__(self, metric: Metric) -> None:
        self._original, self._known = metric, dict(vars(metric))
        groups = [part.process_group for part in metric.modules() if isinstance(part, Metric)]
        self.metric = deepcopy(metric, {id(group): group for group in groups if group is not None})
        for part in self.metric.modules():
            if isinstance(part, Metric):
                part.process_group, part.dist_sync_on_step = None, False
                part._to_sync = part.sync_on_compute = False
        self._is_fresh = False

    def start(self) -> None:
        """Begin a run of the step: the state is that of earlier batches, which the copy does not know."""
        self._is_fresh = False

    def call(self, kind: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The value of ``forward``, or of ``compute`` after ``reset`` in the same step; `NOT_FRESH` if there is none."""
        metric = self.metric
        self._follow()
        if kind == "forward":
            self._is_fresh = False
            metric.reset()
            value = self._forward(args, kwargs)
            metric.reset()
            return value
        if kind == "reset":
            metric.reset()
            self._is_fresh = True
        elif kind == "update" and self._is_fresh:
            metric.update(*args, **kwargs)
        elif kind == "compute" and self._is_fresh:
            value = metric.compute()
            metric._computed = None
            return value
        return NOT_FRESH

    def _follow(self) -> None:
        """Take over attributes that the step has set on the metric itself. States are those of the batch alone."""
        for name, value in vars(self._original).items():
            is_own = name in self.metric._defaults or name in names_of_all()
            if not is_own and self._known.get(name, NOT_FRESH) is not value:
                vars(self.metric)[name] = value

    def _forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The value of the batch. Only `forward` gives gradients, as in torchmetrics."""
        metric = self.metric
        if type(metric).forward is not Metric.forward:  # composed ones call those inside
            return type(metric).forward(metric, *args, **kwargs)
        metric._enable_grad = torch.is_grad_enabled()
        try:
            metric.update(*args, **kwargs)
            return metric.compute()
        finally:
            metric._enable_grad = False
