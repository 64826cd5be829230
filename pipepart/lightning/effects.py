"""What a step does besides computing: it logs, feeds metrics, fills lists, sets attributes.

A recorded step does not run the user's Python again. So these effects are written down while it is recorded, their
tensors become outputs of the graph, and `replay` does them again after each step with the values of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import Metric, MetricCollection

from pipepart.errors import ConfigError
from pipepart.lightning.following import Follows, Sizes, follows, sizes_of
from pipepart.lightning.lazy import Later
from pipepart.lightning.watched_containers import Path, Touched, Watched, text_of, watched_containers
from pipepart.recording import Recording
from pipepart.recording.inputs import trees
from pipepart.recording.inputs.batching import Batching
from pipepart.recording.model_state.reachable import OWN_NAMES
from pipepart.recording.op import op_of
from pipepart.recording.trace.symbols import is_tracked, plain

__all__ = ["Effect", "Effects", "outer_metrics", "watched"]

_KEY = "pipepart_effect"  # the option of a recorded log call that says which effect it belongs to


@dataclass(eq=False)
class Effect:
    """One thing that the step did."""

    kind: str
    """"log", "set", something that is done to a container ("append", "extend", "setitem", "setdefault", "add", ...),
    or a method of a metric: "forward", "update", "compute", "reset"."""
    target: str
    """The attribute or metric (a path from the module), or the name that was logged."""
    ordinal: int
    tree: trees.Tree = trees.LEAF
    leaves: list[Any] = field(default_factory=list)
    """Constants and `Later`s; the places of recorded values hold None."""
    recorded: list[int] = field(default_factory=list)
    """Which leaves are recorded."""
    options: dict[str, Any] = field(default_factory=dict)
    outputs: dict[int, int] = field(default_factory=dict)
    """Recorded leaf -> index of the graph's output that has its value."""
    follows: dict[int, Follows] = field(default_factory=dict)
    """Recorded leaf -> how its value follows the number of samples."""

    @property
    def on_metric(self) -> bool:
        return self.kind in ("forward", "update", "compute", "reset")


@dataclass(frozen=True, eq=False)
class Effects:
    """All effects of a recorded step, in order."""

    all: tuple[Effect, ...]
    returned: Mapping[int, Later]
    """Leaves of the step's result that are values of metrics."""

    separate: frozenset[int]
    """Outputs of the graph that must not be merged by the runtime: an effect needs all micro-batches."""
    averaged: frozenset[int] = frozenset()
    """Outputs of the graph that Lightning averages over replicas (`sync_dist=True`)."""
    checked: bool = False
    """The batch check has seen that what is equal in shape for all micro-batches is a mean over samples, or equal."""

    @property
    def reduced_otherwise(self) -> frozenset[int]:
        """Outputs that are logged with a reduction of their own (a sum, a maximum), not as means over samples."""
        logs = (
            effect for effect in self.all if effect.kind == "log" and effect.options.get("reduce_fx", "mean") != "mean"
        )
        return frozenset(index for effect in logs for index in effect.outputs.values())

    @property
    def logged(self) -> dict[int, str]:
        """The names under which outputs are logged."""
        logs = (effect for effect in self.all if effect.kind == "log")
        return {index: effect.target for effect in logs for index in effect.outputs.values()}


def outer_metrics(module: nn.Module) -> dict[str, Metric | MetricCollection]:
    """Metrics by path, without those that belong to another metric; collections as well as their members."""
    found: dict[str, Metric | MetricCollection] = {}
    inside: set[int] = set()
    for path, child in module.named_modules():
        if isinstance(child, Metric) and id(child) not in inside:
            found[path] = child
            inside.update(id(part) for part in child.modules())
        elif isinstance(child, MetricCollection):
            found[path] = child
    return found


class _Watch:
    """Collects the effects of each run of the step while it is recorded (it runs several times, at several sizes)."""

    def __init__(self, module: LightningModule, batching: Batching | None) -> None:
        self.module, self.batching = module, batching
        self.running = False
        self.sizes = Sizes(None, ())
        self.count = 0
        self.returned: dict[int, Later] = {}
        self.seen: dict[tuple[int, int], dict[Sizes, Any]] = {}
        self.touched = Touched()
        self.given: list[tuple[str, Any, list[Any], trees.Tree]] = []
        """Containers that were put into others, as they were then."""
        self.paths = {id(metric): path for path, metric in outer_metrics(module).items()}

    def start(self, batch: Any) -> None:
        self.count, self.returned, self.running, self.given = 0, {}, True, []
        self.sizes = sizes_of(trees.flatten(batch)[0], self.batching)

    def note(self, kind: str, target: str, value: Any, options: dict[str, Any] | None = None) -> Effect:
        """Write an effect down: recorded values go out through the recorder's own log, constants stay here."""
        effect = Effect(kind, target, self.count, options=options or {})
        self.count += 1
        leaves, effect.tree = trees.flatten(value)
        log: Callable[..., None] = self.module.__dict__["log"]
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) or is_tracked(leaf):
                effect.leaves.append(None)
                effect.recorded.append(position)
                size = _shape(leaf) if isinstance(leaf, torch.Tensor) else plain(leaf)
                self.seen.setdefault((effect.ordinal, position), {})[self.sizes] = size
                log(f"{kind} {target} {position}", leaf, **{_KEY: (effect, position)})
            else:
                effect.leaves.append(leaf)
        if not effect.recorded:
            log(f"{kind} {target}", 0.0, **{_KEY: (effect, None)})
        return effect

    def put(self, kind: str, path: Path, value: Any, key: Any = None) -> None:
        """Something is put into a container."""
        self.note(kind, text_of(path), value, {"path": path, "key": key})
        if isinstance(value, (list, dict, set)):
            self.given.append((text_of(path), value, *trees.flatten(value)))

    def check_given(self) -> None:
        """A container that was put into another one must be complete by then."""
        for text, value, leaves, tree in self.given:
            now, form = trees.flatten(value)
            if form != tree or any(a is not b for a, b in zip(now, leaves)):
                raise ConfigError(
                    f"the step puts a {type(value).__name__} into {text} and changes it afterwards: fill it before."
                )

    def finish(self, recording: Recording) -> tuple[Recording, Effects]:
        """The effects of a recording. What is in containers that the step only fills does not matter for it."""
        found: dict[int, Effect] = {}
        for call in recording.logs:
            effect, position = call.options[_KEY]
            found[effect.ordinal] = effect
            if position is None:
                continue
            if call.output is None:  # turned out to be the same in every run
                effect.leaves[position] = call.constant
                effect.recorded.remove(position)
            else:
                effect.outputs[position] = call.output
                effect.follows[position] = follows(self.seen[(effect.ordinal, position)])
        ordered = tuple(found[key] for key in sorted(found))
        separate = (i for effect in ordered if not _is_mean(effect, recording) for i in effect.outputs.values())
        recording = replace(recording, guards=recording.guards.without(self.touched.covers))
        averaged = (i for effect in ordered if _is_averaged(effect) for i in effect.outputs.values())
        return recording, Effects(ordered, dict(self.returned), frozenset(separate), frozenset(averaged))


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The sizes of a tensor; not recorded."""
    with torch._C.DisableTorchFunction():
        return tuple(int(size) for size in tensor.shape)


def _is_averaged(effect: Effect) -> bool:
    mean = effect.options.get("reduce_fx", "mean") in ("mean", "avg", torch.mean)
    return effect.kind == "log" and bool(effect.options.get("sync_dist")) and mean


def _is_mean(effect: Effect, recording: Recording) -> bool:
    """A logged float whose value over the batch is the mean over the micro-batches, as the runtime merges scalars."""
    if effect.kind != "log" or effect.options.get("reduce_fx", "mean") not in ("mean", "avg", torch.mean):
        return False
    flat: Any = next(reversed(recording.graph.nodes)).args[0]  # type: ignore[call-overload]
    nodes = [flat[index] for index in effect.outputs.values()]
    ops = [op_of(node) for node in nodes if node.op != "get_attr"]
    return len(ops) == len(nodes) and all(op.shape == () and op.dtype and op.dtype.is_floating_point for op in ops)


@contextmanager
def watched(
    module: LightningModule, step: str, batching: Batching | None = None
) -> Iterator[Callable[[Recording], tuple[Recording, Effects]]]:
    """While it is open, effects of `step` are written down. Yields what makes the `Effects` of the recording.

    `batching` says which leaves of the batch hold the samples.
    """
    watch = _Watch(module, batching)
    with ExitStack() as stack:
        for path, metric in outer_metrics(module).items():
            stack.enter_context(_as(metric, _metric_members(watch, path, metric)))
        stack.enter_context(_as(module, _module_members(watch, type(module), step)))
        yield watch.finish


@contextmanager
def _as(thing: Any, members: dict[str, Any]) -> Iterator[None]:
    """The object as one of a subclass with these members."""
    original = type(thing)
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    object.__setattr__(thing, "__class__", type(original.__name__, (original,), {**names, **members}))
    try:
        yield
    finally:
        object.__setattr__(thing, "__class__", original)


def _module_members(watch: _Watch, original: type, step: str) -> dict[str, Any]:
    method = getattr(original, step)
    assign: Any = original.__setattr__

    @wraps(method)
    def run(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        watch.start(batch)
        try:
            with watched_containers(self, watch):
                result = method(self, batch, *args, **kwargs)
            watch.check_given()
        finally:
            watch.running = False
        leaves, tree = trees.flatten(result)
        watch.returned = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Later)}
        return trees.unflatten([0.0 if isinstance(leaf, Later) else leaf for leaf in leaves], tree)

    def log(name: str, value: Any, *args: Any, **options: Any) -> None:
        options = {**dict(zip(_LOG_ARGUMENTS, args)), **options}
        if is_tracked(options.get("batch_size")):
            del options["batch_size"]  # the size of what is at hand: of the whole batch when it is replayed
        if isinstance(value, Metric):
            if id(value) not in watch.paths:
                raise ConfigError(
                    f"self.log({name!r}, ...) of a metric that is no attribute of the module: make it one"
                )
            watch.note("log", name, None, {**options, "metric": watch.paths[id(value)]})
        else:
            detach = isinstance(value, torch.Tensor) and value.requires_grad
            watch.note("log", name, value.detach() if detach else value, options)

    def log_dict(dictionary: Any, *args: Any, **options: Any) -> None:
        for name, value in dictionary.items():
            log(name, value, *args, **options)

    def set_attribute(self: Any, name: str, value: Any) -> None:
        if isinstance(value, Watched) and getattr(self, name, None) is value:
            return  # the second half of +=
        if watch.running and name not in OWN_NAMES:
            _check_assigned(self, name, value)
            watch.note("set", name, value)
        assign(self, name, value)

    return {
        step: run,
        "log": property(lambda self: log),
        "log_dict": property(lambda self: log_dict),
        "__setattr__": set_attribute,
        "_pipepart_sets": True,  # tensors that the step keeps are set after it, with the values of the whole batch
    }


_LOG_ARGUMENTS = (
    "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist", "sync_dist_group",
    "add_dataloader_idx", "batch_size", "metric_attribute", "rank_zero_only",
)  # fmt: skip


def _check_assigned(module: nn.Module, name: str, value: Any) -> None:
    where = f"the step sets self.{name}"
    if name in module._parameters or name in module._modules or isinstance(value, nn.Module):
        raise ConfigError(f"{where}, a part of the model: a recorded step cannot replace it. Do that in a hook.")
    if name in module._buffers:
        raise ConfigError(f"{where}, a buffer: change its content instead, self.{name}.copy_(...), or do it in a hook.")
    if not any(isinstance(leaf, (torch.Tensor, Later)) for leaf in trees.flatten(value)[0]):
        raise ConfigError(
            f"{where} to {value!r}. A recorded step does not run this Python again, so a counter or flag would never "
            f"change: set it in a hook (on_train_batch_end, on_validation_batch_end), or use batch_idx or global_step."
        )


def _metric_members(watch: _Watch, path: str, metric: Metric | MetricCollection) -> dict[str, Any]:
    def method(kind: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if kind == "compute" and isinstance(metric, MetricCollection):
                raise ConfigError(
                    f"the step calls self.{path}.compute(): do that in on_..._epoch_end, or log the collection."
                )
            effect = watch.note(kind, path, (args, kwargs))
            if kind not in ("forward", "compute"):
                return None
            if isinstance(metric, MetricCollection):
                names = [str(name) for name in MetricCollection.keys(metric)]
                return {name: Later.of(effect.ordinal, f"metric {path}", name) for name in names}
            return Later.of(effect.ordinal, f"metric {path}")

        return call

    def attribute(kind: str) -> property:
        return property(lambda self: method(kind))

    members: dict[str, Any] = {kind: attribute(kind) for kind in ("forward", "update", "compute", "reset")}
    members["__call__"] = lambda self, *args, **kwargs: method("forward")(*args, **kwargs)
    return members
