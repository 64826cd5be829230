"""torchmetrics in a pipeline: calls of metrics in a recorded step, and their states and values in a run.

A metric is fed on the last stage of each replica, after the step. Its value is then known on every rank.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric, MetricCollection

from pipepart.errors import ConfigError, PipelineError
from pipepart.lightning.fresh_metrics import NOT_FRESH, FreshMetric
from pipepart.lightning.hook_calls import aside
from pipepart.lightning.run_patches import RunPatches
from pipepart.lightning.watched_containers import is_plain_object
from pipepart.recording.inputs import trees
from pipepart.recording.model_state.reachable import OWN_NAMES
from pipepart.recording.recorded_run.ops import is_torch_leaf
from pipepart.runtime import StageRuntime
from pipepart.runtime.failure import guarded

__all__ = [
    "AnyMetric",
    "ConnectedMetrics",
    "Later",
    "NeedsValue",
    "all_metrics",
    "made_on_last_stage",
    "metric_members",
    "on_this_rank",
]

AnyMetric = Metric | MetricCollection
_DEPTH = 3


def all_metrics(module: nn.Module) -> dict[str, AnyMetric]:
    """Metrics and collections by path: those of the module and of its submodules, and those in their plain objects.

    A metric inside another one is also here: a step may use it alone.
    """
    tree = {path: child for path, child in module.named_modules() if isinstance(child, AnyMetric)}
    found: dict[str, AnyMetric] = dict(tree)
    seen = {id(metric) for metric in tree.values()}

    def search(text: str, value: Any, depth: int) -> None:
        if isinstance(value, AnyMetric) and id(value) not in seen:
            seen.add(id(value))
            found[text] = value
        elif depth and type(value) in (list, tuple):
            for i, item in enumerate(value):
                search(f"{text}[{i}]", item, depth - 1)
        elif depth and type(value) is dict:
            for key, item in value.items():
                search(f"{text}[{key!r}]", item, depth - 1)
        elif depth and is_plain_object(value):
            for name, item in vars(value).items():
                search(f"{text}.{name}", item, depth - 1)

    for path, part in module.named_modules():
        if isinstance(part, AnyMetric) or is_torch_leaf(part):
            continue
        for name, value in vars(part).items():
            if name not in OWN_NAMES:
                search(f"{path}.{name}" if path else name, value, _DEPTH)
    return found


class NeedsValue(ConfigError):
    """The step computes with the value of a metric, so the ops of the metric must be recorded."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__(text)
        self.path = path


# ---- while a step is recorded


class Later:
    """Placeholder for the value of a metric in a recorded step, and for values computed from it.

    The value is known after the step: ``value(known)`` computes it from the values of effects by their numbers.
    """

    def __init__(self, compute: Callable[[Mapping[int, Any]], Any], origin: str, metric: str | None = None) -> None:
        self.__dict__.update(_compute=compute, _origin=origin, _metric=metric)

    @staticmethod
    def of(ordinal: int, origin: str, key: str | None = None, metric: str | None = None) -> Later:
        """The value of effect number `ordinal`, or one entry of it if it is a dict.

        `metric` is the path of the metric whose ops can be recorded instead.
        """
        return Later(lambda known: known[ordinal] if key is None else known[ordinal][key], origin, metric)

    @staticmethod
    def joined(parts: Sequence[Any], make: Callable[[list[Any]], Any]) -> Later:
        """``make(parts)`` with the values of those parts that are known after the step."""
        return Later(lambda k: make([part.value(k) if isinstance(part, Later) else part for part in parts]), "a text")

    def then(self, function: Callable[[Any], Any]) -> Later:
        """``function(value)``, after the step."""
        return self._then(function, self)

    def needed(self) -> None:
        """Refuse a use of the value in the loss, or ask for the ops of the metric, if they can be recorded."""
        text = (
            f"the step computes with the value of {self._origin} and a tensor of the model. That value is known "
            "after the step, on the last stage: log it unchanged, or use torchmetrics.functional in the step."
        )
        raise ConfigError(text) if self._metric is None else NeedsValue(self._metric, text)

    def value(self, known: Mapping[int, Any]) -> Any:
        return self._compute(known)

    def _then(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Later:
        if any(isinstance(item, torch.Tensor) for item in (*args, *kwargs.values())):
            self.needed()

        def compute(known: Mapping[int, Any]) -> Any:
            given = [item.value(known) if isinstance(item, Later) else item for item in args]
            named = {key: item.value(known) if isinstance(item, Later) else item for key, item in kwargs.items()}
            return function(*given, **named)

        return Later(compute, self._origin, self._metric)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._then(getattr, self, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Later:
        return self._then(lambda function, *a, **k: function(*a, **k), self, *args, **kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        later = next(item for item in (*args, *(kwargs or {}).values()) if isinstance(item, Later))
        return later._then(func, *args, **(kwargs or {}))

    def _refuse(self, *args: Any) -> Any:
        raise ConfigError(
            f"the step converts the value of {self._origin} to a Python number, or branches on it. That value is known "
            "after the step: use it in a hook (on_train_batch_end, on_validation_epoch_end)."
        )

    __bool__ = __float__ = __int__ = __len__ = __iter__ = __format__ = __index__ = _refuse


def _operator(name: str, reflected: bool = False) -> Callable[..., Later]:
    function = getattr(operator, name)
    return lambda self, *others: self._then(function, *((*others, self) if reflected else (self, *others)))


for _name in ("add", "sub", "mul", "truediv", "pow"):
    setattr(Later, f"__r{_name}__", _operator(_name, reflected=True))
for _name in ("add", "sub", "mul", "truediv", "pow", "getitem", "lt", "le", "gt", "ge", "neg", "abs"):
    setattr(Later, f"__{_name}__", _operator(_name))


def metric_members(
    path: str, metric: AnyMetric, note: Callable[[str, str, Any], int], fresh: FreshMetric | None = None
) -> dict[str, Any]:
    """Methods that replace those of a metric in a recorded step.

    Each call is passed to ``note(kind, path, (args, kwargs))``, which returns the number of the effect. With `fresh`, the
    value of a batch is computed by ops of the graph, so that the step can compute with it.
    """

    def call(kind: str, *args: Any, **kwargs: Any) -> Any:
        value = NOT_FRESH if fresh is None else fresh.call(kind, args, kwargs)
        if kind == "compute" and isinstance(metric, MetricCollection):
            raise ConfigError(
                f"the step calls self.{path}.compute() of a collection. Call it in on_..._epoch_end, or log the collection."
            )
        ordinal = note(kind, path, (args, kwargs))
        if kind not in ("forward", "compute"):
            return None
        if value is not NOT_FRESH:
            return value
        if isinstance(metric, MetricCollection):
            names = [str(name) for name in MetricCollection.keys(metric)]
            return {name: Later.of(ordinal, f"metric {path}", name) for name in names}
        recordable = path if fresh is None else None
        return Later.of(ordinal, f"metric {path}", metric=recordable)

    def attribute(kind: str) -> property:
        return property(lambda self: lambda *args, **kwargs: call(kind, *args, **kwargs))

    members: dict[str, Any] = {kind: attribute(kind) for kind in ("forward", "update", "compute", "reset")}
    members["__call__"] = lambda self, *args, **kwargs: call("forward", *args, **kwargs)
    return members


# ---- in a run

_alone = False


@contextmanager
def on_this_rank() -> Iterator[None]:
    """Inside, metrics compute for this rank alone (their `forward` does so for the value of a batch)."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


def made_on_last_stage(runtime: StageRuntime, make: Callable[[], Any], failed: str) -> Any:
    """The value of ``make()`` on the last stage, on all stages of the replica. If it raises there, all stages raise.

    Every stage must call it. `failed` begins the error on the other stages.
    """
    value: Any = None
    text: str | None = None
    failure: Exception | None = None
    with guarded(runtime.groups):
        if runtime.is_last:
            try:
                value = make()
            except Exception as error:
                failure, text = error, f"{type(error).__name__}: {error}"
        text, value = runtime.from_last(trees.moved((text, value), "cpu"))
        if failure is not None:
            raise failure
        if text is not None:
            raise PipelineError(f"{failed}: {text}")
        return trees.moved(value, runtime.device)


class ConnectedMetrics:
    """The metrics of a module, with the same values on every rank. All ranks must compute them together."""

    def __init__(self, module: nn.Module, runtime: StageRuntime) -> None:
        self._runtime = runtime
        self._metrics: list[Metric] = []
        self._reach, self._compute = RunPatches(), RunPatches()
        groups = runtime.groups
        if groups is None:
            return
        self._metrics = [metric for metric in all_metrics(module).values() if isinstance(metric, Metric)]
        parts = {id(part): part for metric in self._metrics for part in _parts(metric)}
        for part in parts.values():
            # Metrics gather over the world by default; the other stages of a replica have nothing to add.
            self._reach.put(part, "process_group", groups.copies)
            self._reach.put(part, "distributed_available_fn", _no if groups.copies is None else _yes)
            self._compute.put(part, "compute", _shared_compute(part.compute, runtime))

    def release(self) -> None:
        """Restore the original metrics."""
        self._compute.undo()
        self._reach.undo()

    def rest(self) -> None:
        """Copy the states to every rank after a run. Each rank then computes alone, with its copies in other replicas."""
        with guarded(self._runtime.groups):
            for metric in self._metrics:
                states = [_state_of(part) for part in _parts(metric)] if self._runtime.is_last else None
                states = self._runtime.from_last(trees.map_structure(_to_host, states))
                for part, state in zip(_parts(metric), states):
                    vars(part).update(state)
        self._compute.undo()
        self._metrics = []


def _parts(metric: Metric) -> list[Metric]:
    """A metric and the metrics inside it (wrappers)."""
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


def _shared_compute(own: Callable[..., Any], runtime: StageRuntime) -> Callable[..., Any]:
    def compute(*args: Any, **kwargs: Any) -> Any:
        def alone() -> Any:
            with on_this_rank():  # metrics inside this one
                return own(*args, **kwargs)

        if _alone:
            return alone()
        with aside():
            return made_on_last_stage(runtime, alone, "the last stage could not compute a metric")

    return compute
