"""Effects of a recorded step: it logs, feeds metrics, fills containers and sets attributes.

A recorded step does not run the user's Python again. So its effects are noted while it is recorded, their tensors become
extra outputs of the recording, and `repeat_effects` repeats them after each step with the values of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torchmetrics import Metric

from pipepart.errors import ConfigError
from pipepart.lightning.lightning_step import Logs, detached, record_lightning_step, with_class
from pipepart.lightning.manual_step import ManualNotes
from pipepart.lightning.metrics import Later, metric_members, outer_metrics
from pipepart.lightning.watched_containers import Path, Touched, Watched, text_of, watched_containers
from pipepart.recording import ExtraOutput, Recording
from pipepart.recording.inputs import trees
from pipepart.recording.inputs.batching import Batching
from pipepart.recording.model_state.reachable import OWN_NAMES
from pipepart.recording.op import op_of
from pipepart.recording.recorded_run.symbols import is_tracked, plain

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

__all__ = ["UNSEEN", "Effect", "Effects", "Follows", "Sizes", "follows", "record_with_effects", "sizes_of"]

_KEY = "pipepart_effect"
"""The name under which an extra output has its effect, and the position of its value in the effect (None: no value)."""
_ACT = "act"
"""An act of manual optimization. It is part of the recording, so that all ranks notice if theirs differ; `ManualNotes`
repeats it."""


# ---- how a value follows the number of samples


@dataclass(frozen=True)
class Sizes:
    """The sizes of the batch in one run of a step."""

    samples: int | None
    """Number of samples. None: the batch is split as a container, and no dimension holds its samples."""
    others: tuple[tuple[int, ...], ...]
    """All other sizes of the batch."""


@dataclass(frozen=True)
class Follows:
    """Relation of a value to the number of samples, as seen in runs of a step at several sizes."""

    dims: tuple[int, ...] | None = None
    """Dimensions of a tensor that grow with the number of samples. None: only one number of samples was seen."""
    counts: bool = False
    """Whether the value is a number that is proportional to the number of samples."""

    def dim(self, shapes: Sequence[torch.Size], sizes: Sequence[int]) -> int | None:
        """The dimension along which values of micro-batches of `sizes` samples are concatenated; None if there is none.

        ValueError: the dimension is ambiguous.
        """
        if len({len(shape) for shape in shapes}) != 1:
            raise ValueError("the number of dimensions differs between micro-batches")
        every = range(len(shapes[0]))
        differ = {d for d in every if len({shape[d] for shape in shapes}) > 1}
        found = differ | set(self.dims or ())
        if self.dims is None and not differ:
            found = {d for d in every if all(shape[d] == size for shape, size in zip(shapes, sizes))}
        if len(found) > 1:
            raise ValueError(f"its dimensions {sorted(found)} all follow the number of samples")
        return next(iter(found), None)


UNSEEN = Follows()


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The sizes of a tensor. Reading them is not recorded."""
    with torch._C.DisableTorchFunction():
        return tuple(int(size) for size in tensor.shape)


def sizes_of(leaves: Iterable[Any], batching: Batching | None) -> Sizes:
    """The sizes of a batch as the step receives it. Reading them is not recorded."""
    samples: int | None = None
    others = []
    dims = batching.dims if batching is not None else ()
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            continue
        shape = _shape(leaf)
        dim = dims[index] if index < len(dims) else None
        if dim is not None:
            samples = shape[dim] if samples is None else samples
            shape = shape[:dim] + shape[dim + 1 :]
        others.append(shape)
    return Sizes(samples, tuple(others))


def follows(seen: Mapping[Sizes, Any]) -> Follows:
    """Derive `Follows` from the shapes (or numbers) of one value in several runs."""
    pairs = [
        (a, b)
        for a in seen
        for b in seen
        if a != b and (a.samples is None or (a.samples < (b.samples or 0) and a.others == b.others))
    ]
    if not pairs:
        return UNSEEN
    first, second = pairs[0]
    if not isinstance(seen[first], tuple):
        proportional = first.samples and seen[first] * (second.samples or 0) == seen[second] * first.samples
        return Follows((), bool(proportional) and seen[first] != seen[second])
    if len({len(shape) for shape in seen.values()}) > 1:
        return UNSEEN
    every = range(len(seen[first]))
    return Follows(tuple(d for d in every if any(seen[a][d] != seen[b][d] for a, b in pairs)))


# ---- effects


@dataclass(eq=False)
class Effect:
    """One effect of a step."""

    kind: str
    """"log", "set", a method of a container ("append", "extend", "setitem", "setdefault", "add", ...), or a method of a
    metric: "forward", "update", "compute", "reset"."""
    target: str
    """The attribute or the metric, as a path from the module, or the logged name."""
    ordinal: int
    """The number of the effect in its step."""
    tree: trees.Tree = trees.LEAF
    leaves: list[Any] = field(default_factory=list)
    """The leaves of the value: constants and `Later`s; None where the graph computes the value."""
    options: dict[str, Any] = field(default_factory=dict)
    outputs: dict[int, int] = field(default_factory=dict)
    """Position of a computed leaf -> index of the output of the graph."""
    follows: dict[int, Follows] = field(default_factory=dict)
    """Position of a computed leaf -> how its value follows the number of samples."""

    @property
    def on_metric(self) -> bool:
        return self.kind in ("forward", "update", "compute", "reset")

    @property
    def is_mean(self) -> bool:
        """Whether the effect logs a value with the reduction "mean", the default."""
        return self.kind == "log" and self.options.get("reduce_fx", "mean") in ("mean", "avg", torch.mean)


@dataclass(frozen=True, eq=False)
class Effects:
    """All effects of a recorded step, in order."""

    all: tuple[Effect, ...]
    returned: Mapping[int, Later]
    """Leaves of the result of the step that are values of metrics."""
    separate: frozenset[int]
    """Outputs of the graph that the runtime must not merge, since an effect needs those of all micro-batches."""
    averaged: frozenset[int] = frozenset()
    """Outputs of the graph that Lightning averages over replicas (`sync_dist=True`)."""
    checked: bool = False
    """Whether the batch check has shown that values of one shape for all micro-batches are equal, or means over samples."""

    @property
    def reduced_otherwise(self) -> frozenset[int]:
        """Outputs that are logged with another reduction than a mean over samples (a sum, a maximum)."""
        logs = (e for e in self.all if e.kind == "log" and e.options.get("reduce_fx", "mean") != "mean")
        return frozenset(index for effect in logs for index in effect.outputs.values())

    @property
    def logged(self) -> dict[int, str]:
        """The names under which outputs are logged."""
        logs = (effect for effect in self.all if effect.kind == "log")
        return {index: effect.target for effect in logs for index in effect.outputs.values()}


def record_with_effects(
    module: LightningModule, step: str, batch: Any, *, batching: Batching | None = None, **options: Any
) -> tuple[Recording, Effects, ManualNotes | None]:
    """Record a step, its effects and its acts. The options are those of `record_lightning_step`."""
    watch = _Watch(module, batching)
    with watch.installed():
        recording = record_lightning_step(module, step, batch, batching=batching, logs=watch, **options)
    return *watch.finish(recording), watch.manual


class _Watch(Logs):
    """Notes the effects of each run of a step. A step runs several times, at several sizes, while it is recorded."""

    def __init__(self, module: LightningModule, batching: Batching | None) -> None:
        super().__init__()
        self.module, self.batching = module, batching
        self.is_running = False
        self.sizes = Sizes(None, ())
        self.count = 0
        self.results: dict[int, Later] = {}
        """Leaves of the last result that are values of metrics."""
        self.seen: dict[tuple[int, int], dict[Sizes, Any]] = {}
        """(effect, position) -> the shape or the number at each size of the batch."""
        self.touched = Touched()
        self.given: list[tuple[str, Any, list[Any], trees.Tree]] = []
        """Containers that were put into others, with their content at that time."""
        self.metrics = outer_metrics(module)
        self.paths = {id(metric): path for path, metric in self.metrics.items()}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, the module and its metrics report their use by a step."""
        members = {
            "__setattr__": _set_attribute(self, type(self.module).__setattr__),
            "_pipepart_sets": True,  # tensors that the step keeps are set after it, with the values of the whole batch
        }
        with ExitStack() as stack:
            for path, metric in self.metrics.items():
                stack.enter_context(with_class(metric, metric_members(path, metric, self.note)))
            stack.enter_context(with_class(self.module, members))
            yield

    @contextmanager
    def running(self, module: nn.Module, batch: Any) -> Iterator[None]:
        self.extras, self.count, self.results, self.given = [], 0, {}, []
        self.sizes = sizes_of(trees.leaves_of(batch), self.batching)
        self.is_running = True
        try:
            with watched_containers(module, self):
                yield
            self._check_given()
        finally:
            self.is_running = False

    def log(self, name: str, value: Any, options: dict[str, Any]) -> None:
        if not isinstance(value, Metric):
            self.note("log", name, detached(value), options)
        elif id(value) in self.paths:
            self.note("log", name, None, {**options, "metric": self.paths[id(value)]})
        else:
            raise ConfigError(
                f"the step logs a metric as {name!r} that is not an attribute of the module. Make it an attribute (self.NAME)."
            )

    def act(self, text: str) -> None:
        self.note(_ACT, text, None)

    def returned(self, result: Any) -> Any:
        leaves, tree = trees.flatten(result)
        self.results = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Later)}
        return trees.unflatten([0.0 if isinstance(leaf, Later) else leaf for leaf in leaves], tree)

    def note(self, kind: str, target: str, value: Any, options: dict[str, Any] | None = None) -> int:
        """Note an effect and return its number. Computed leaves become extra outputs, constants stay in the effect."""
        effect = Effect(kind, target, self.count, options=options or {})
        self.count += 1
        leaves, effect.tree = trees.flatten(value)
        extras = []
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) or is_tracked(leaf):
                effect.leaves.append(None)
                size = _shape(leaf) if isinstance(leaf, torch.Tensor) else plain(leaf)
                self.seen.setdefault((effect.ordinal, position), {})[self.sizes] = size
                about = {_KEY: (effect, position)}
                extras.append(ExtraOutput(f"{kind} {target} {position}", detached(leaf), about))
            else:
                effect.leaves.append(leaf)
        self.extras += extras or [ExtraOutput(f"{kind} {target}", 0.0, {_KEY: (effect, None)})]
        return effect.ordinal

    def put(self, kind: str, path: Path, value: Any, key: Any = None) -> None:
        """Note that `value` is put into the container at `path`."""
        self.note(kind, text_of(path), value, {"path": path, "key": key})
        if isinstance(value, (list, dict, set)):
            self.given.append((text_of(path), value, *trees.flatten(value)))

    def _check_given(self) -> None:
        """Refuse changes of a container after it was put into another one."""
        for text, value, leaves, tree in self.given:
            now, form = trees.flatten(value)
            if form != tree or any(a is not b for a, b in zip(now, leaves)):
                raise ConfigError(
                    f"the step puts a {type(value).__name__} into {text} and changes it afterwards. Fill it first."
                )

    def finish(self, recording: Recording) -> tuple[Recording, Effects]:
        """The recording, without guards on containers that the step only fills, and its effects."""
        found: dict[int, Effect] = {}
        for extra in recording.extras:
            effect, position = extra.about[_KEY]
            found[effect.ordinal] = effect
            if position is None:
                continue
            if extra.output is None:  # equal in every run
                effect.leaves[position] = extra.value
            else:
                effect.outputs[position] = extra.output
                effect.follows[position] = follows(self.seen[(effect.ordinal, position)])
        ordered = tuple(found[key] for key in sorted(found) if found[key].kind != _ACT)
        separate = (i for effect in ordered if not _merges_as_mean(effect, recording) for i in effect.outputs.values())
        averaged = (i for e in ordered if e.is_mean and e.options.get("sync_dist") for i in e.outputs.values())
        recording = replace(recording, guards=recording.guards.without(self.touched.covers))
        return recording, Effects(ordered, dict(self.results), frozenset(separate), frozenset(averaged))


def _merges_as_mean(effect: Effect, recording: Recording) -> bool:
    """Whether the value over the batch is the mean over the micro-batches, as the runtime merges scalars."""
    if not effect.is_mean:
        return False
    flat: Any = next(reversed(recording.graph.nodes)).args[0]  # type: ignore[call-overload]
    nodes = [flat[index] for index in effect.outputs.values()]
    ops = [op_of(node) for node in nodes if node.op != "get_attr"]
    return len(ops) == len(nodes) and all(op.shape == () and op.dtype and op.dtype.is_floating_point for op in ops)


def _set_attribute(watch: _Watch, assign: Any) -> Any:
    def set_attribute(self: Any, name: str, value: Any) -> None:
        if isinstance(value, Watched) and getattr(self, name, None) is value:
            return  # the second half of +=
        if watch.is_running and name not in OWN_NAMES:
            _check_assigned(self, name, value)
            watch.note("set", name, value)
        assign(self, name, value)

    return set_attribute


def _check_assigned(module: nn.Module, name: str, value: Any) -> None:
    where = f"the step sets self.{name}"
    if name in module._parameters or name in module._modules or isinstance(value, nn.Module):
        raise ConfigError(f"{where}, a part of the model: a recorded step cannot replace it. Replace it in a hook.")
    if name in module._buffers:
        raise ConfigError(
            f"{where}, a buffer: change its content instead, self.{name}.copy_(...), or set it in a hook."
        )
    if not any(isinstance(leaf, (torch.Tensor, Later)) for leaf in trees.leaves_of(value)):
        raise ConfigError(
            f"{where} to {value!r}. A recorded step does not run this Python again, so a counter or flag would never "
            f"change: set it in a hook (on_train_batch_end, on_validation_batch_end), or use batch_idx or global_step."
        )
