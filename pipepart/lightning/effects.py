"""Effects of a recorded step: it logs, feeds metrics, fills containers and sets attributes.

A recorded step does not run the user's Python again. So its effects are noted while it is recorded, their tensors become
extra outputs of the recording, and `repeat_effects` repeats them after each step with the values of the whole batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torchmetrics import Metric

from pipepart.errors import CaptureError, ConfigError
from pipepart.lightning.attributes import attribute_setter
from pipepart.lightning.follows import Follows, Sizes, follows, shape_of, sizes_of
from pipepart.lightning.fresh_metrics import FreshMetric
from pipepart.lightning.lightning_step import Logs, detached, record_lightning_step, with_class
from pipepart.lightning.manual_step import ManualNotes
from pipepart.lightning.metrics import Later, NeedsValue, all_metrics, metric_members
from pipepart.lightning.watched_containers import Path, Touched, text_of, watched_containers
from pipepart.recording import ExtraOutput, Recording
from pipepart.recording.inputs import trees
from pipepart.recording.inputs.batching import Batching
from pipepart.recording.model_state.places import Place, is_plain_value
from pipepart.recording.model_state.reachable import variables
from pipepart.recording.model_state.reads import active
from pipepart.recording.op import op_of
from pipepart.recording.recorded_run.failures import Unsettled
from pipepart.recording.recorded_run.symbols import atoms_of, is_tracked, plain, value_from

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

__all__ = ["Effect", "Effects", "record_with_effects"]

_KEY = "pipepart_effect"
"""The name under which an extra output has its effect, and the position of its value in the effect (None: no value)."""
_ACT = "act"
"""An act of manual optimization. It is part of the recording, so that all ranks notice if theirs differ; `ManualNotes`
repeats it."""


@dataclass(eq=False)
class Effect:
    """One effect of a step."""

    kind: str
    """"log", "set", "number" (computed from others), a method of a container ("append", "extend", "setitem", "setdefault",
    "add", ...; "call" for others), or a method of a metric: "forward", "update", "compute", "reset"."""
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
    def uses_metric(self) -> bool:
        return self.on_metric or "metric" in self.options

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
    hidden: Mapping[str, Any] = field(default_factory=dict)
    """Metrics that are in no registry of modules, by path."""
    constants: Mapping[int, Any] = field(default_factory=dict)
    """Values of effects that are equal in every step, by the number of the effect."""
    checked: bool = False
    """Whether the batch check has shown that values of one shape for all micro-batches are equal, or means over samples."""

    def metrics(self, module: nn.Module) -> dict[str, Any]:
        """The metrics that the step uses, by path."""
        paths = {e.target if e.on_metric else e.options["metric"] for e in self.all if e.uses_metric}
        return {path: self.hidden[path] if path in self.hidden else module.get_submodule(path) for path in paths}

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
    fresh: set[str] = set()
    filled: list[Place] | None = None
    converting = False
    while True:
        watch = _Watch(module, step, batching, fresh, filled or ())
        try:
            with watch.installed():
                recording = record_lightning_step(
                    module, step, batch, batching=batching, logs=watch, converting=converting, **options
                )
        except NeedsValue as need:  # once for each metric
            fresh.add(need.path)
            continue
        except CaptureError as error:
            if filled is not None or not _fills_variable(error):
                raise
            filled = variables((getattr(type(module), step),), module.named_modules())
            continue
        if converting or not watch.undecided:
            return *watch.finish(recording), watch.manual
        converting = True


def _fills_variable(error: CaptureError) -> bool:
    """Whether a step could not be recorded because it fills a variable of its file or of an enclosing function."""
    cause = error.__cause__
    return isinstance(cause, Unsettled) and str(cause).startswith(("variable ", "global "))


class _Watch(Logs):
    """Notes the effects of each run of a step. A step runs several times, at several sizes, while it is recorded."""

    def __init__(
        self,
        module: LightningModule,
        step: str,
        batching: Batching | None,
        fresh: Collection[str],
        filled: Sequence[Place] = (),
    ) -> None:
        """`fresh` are the metrics whose values the step computes with; `filled` are variables that it may fill."""
        super().__init__()
        self.variables = filled
        self.module, self.trains, self.batching = module, step == "training_step", batching
        self.is_running = False
        self.sizes = Sizes(None, ())
        self.count = 0
        self.results: dict[int, Later] = {}
        """Leaves of the result of the last recorded run that are values of metrics, or numbers."""
        self.seen: dict[tuple[int, int], dict[Sizes, Any]] = {}
        """(effect, position) -> the shape or the number at each size of the batch."""
        self.touched = Touched()
        self.given: list[tuple[str, Any, list[Any], trees.Tree]] = []
        """Containers that were put into others, with their content at that time."""
        self.numbers: dict[int, tuple[Any, Later]] = {}
        """Tracked numbers that were noted in this run."""
        self.leads: list[int] = []
        """For each call of `note` in the last recorded run, the extra outputs that its numbers needed."""
        self.counted: list[int] = []
        """The same in the run that goes on."""
        self.calls = 0
        self.decided: dict[tuple[int, str, int], Any] = {}
        """(effect, its kind and target, position) -> the value that Python decided in the first recorded run."""
        self.undecided: dict[str, tuple[Any, Any]] = {}
        self.metrics = all_metrics(module)
        self.fresh = {path: FreshMetric(self.metrics[path]) for path in fresh}  # type: ignore[arg-type]
        self.paths = {id(metric): path for path, metric in self.metrics.items()}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, the module and its metrics report their use by a step."""
        members = {
            "__setattr__": attribute_setter(self, type(self.module).__setattr__),
            "_pipepart_sets": True,  # tensors that the step keeps are set after it, with the values of the whole batch
        }
        with ExitStack() as stack:
            for path, metric in self.metrics.items():
                members_ = metric_members(path, metric, self.note, self.fresh.get(path))
                stack.enter_context(with_class(metric, members_))
            stack.enter_context(with_class(self.module, members))
            yield

    @contextmanager
    def running(self, module: nn.Module, batch: Any) -> Iterator[None]:
        self.extras, self.count, self.given = [], 0, []
        self.numbers, self.calls, self.counted = {}, 0, []
        for metric in self.fresh.values():
            metric.start()
        self.sizes = sizes_of(trees.leaves_of(batch), self.batching)
        self.is_running = True
        try:
            with watched_containers(module, self):
                yield
            self._check_given()
            if active() is not None:
                self.leads = self.counted  # not those of a run that has failed, at a size that the model does not take
        finally:
            self.is_running = False

    def log(self, name: str, value: Any, options: dict[str, Any]) -> None:
        if not isinstance(value, Metric):
            self.note("log", name, detached(value), options)
        elif id(value) in self.paths:
            self.note("log", name, None, {**options, "metric": self.paths[id(value)]})
        else:
            raise ConfigError(
                f"the step logs a metric as {name!r} that the module does not hold. Make it an attribute (self.NAME)."
            )

    def act(self, text: str) -> None:
        self.note(_ACT, text, None)

    def set_on_trainer(self, name: str, value: bool) -> None:
        self.note("trainer", name, value)

    def returned(self, result: Any) -> Any:
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if self.trains and isinstance(loss, Later):
            loss.needed()
        leaves, tree = trees.flatten(result)
        leaves = self._known_later(leaves)
        if active() is not None:
            self.results = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Later)}
        return trees.unflatten([0.0 if isinstance(leaf, Later) else leaf for leaf in leaves], tree)

    def note(self, kind: str, target: str, value: Any, options: dict[str, Any] | None = None) -> int:
        """Note an effect and return its number. Computed leaves become extra outputs, constants stay in the effect."""
        leaves, tree = trees.flatten(value)
        leaves = self._known_later(leaves)
        effect = Effect(kind, target, self.count, tree, options=options or {})
        self.count += 1
        self._add(effect, leaves)
        return effect.ordinal

    def _add(self, effect: Effect, leaves: list[Any]) -> None:
        extras = []
        name = f"{effect.kind} {effect.target}"
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) or is_tracked(leaf):
                effect.leaves.append(None)
                if active() is not None:  # runs that are not recorded have other numbers of effects
                    size = shape_of(leaf) if isinstance(leaf, torch.Tensor) else plain(leaf)
                    self.seen.setdefault((effect.ordinal, position), {})[self.sizes] = size
                about = {_KEY: (effect, position)}
                extras.append(ExtraOutput(f"{name} {position}", detached(leaf), about))
            else:
                effect.leaves.append(leaf)
                self._decide((effect.ordinal, name, position), leaf)
        self.extras += extras or [ExtraOutput(name, 0.0, {_KEY: (effect, None)})]

    def _decide(self, key: tuple[int, str, int], value: Any) -> None:
        """Compare a value that Python has decided with that of the first run: it must not come from a clock or from chance."""
        if active() is None or not is_plain_value(value):
            return
        before = self.decided.setdefault(key, value)
        if type(before) is type(value) and before != value and before == before:
            self.undecided.setdefault(key[1], (before, value))

    def _known_later(self, leaves: list[Any]) -> list[Any]:
        """Replace tracked numbers by values that are known after the step, computed from the numbers of the whole batch.

        A run that is not recorded has no tracked numbers; it gets as many extra outputs as a recorded one.
        """
        count, call = len(self.extras), self.calls
        self.calls += 1
        if active() is None:
            lead = self.leads[call] if call < len(self.leads) else 0
            self.extras += [ExtraOutput("number", None, {_KEY: (None, None)})] * lead
            return leaves
        found = [self._number(leaf) if is_tracked(leaf) else leaf for leaf in leaves]
        self.counted.append(len(self.extras) - count)
        return found

    def _number(self, number: Any) -> Later:
        """The value of a tracked number after the step. Its atoms are extra outputs: inputs, sizes, and items of tensors."""
        if id(number) not in self.numbers:
            atoms = atoms_of(number)
            compute = value_from(number, {key: itemgetter(i) for i, key in enumerate(atoms)})
            effect = Effect("number", "", self.count, options={"compute": compute})
            self.count += 1
            self._add(effect, list(atoms.values()))
            self.numbers[id(number)] = number, Later.of(effect.ordinal, "a number")
        return self.numbers[id(number)][1]

    def put(self, kind: str, path: Path, value: Any, key: Any = None) -> None:
        """Note that `value` is put into the container at `path`."""
        self.note(kind, text_of(path), value, {"path": path, "key": key})
        if isinstance(value, (list, dict, set)):
            self.gave(text_of(path), value)

    def gave(self, text: str, value: Any) -> None:
        """Note that a container was put into a place that `text` names. It must not change there unseen."""
        self.given.append((text, value, *trees.flatten(value)))

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
        if self.undecided:
            name, (a, b) = next(iter(self.undecided.items()))
            raise CaptureError(
                f"{name}: two runs of the step on one state gave {a!r} and {b!r}, so it is no number or tensor that the "
                "graph computes (a clock, a random number of Python, a text made of a loss). A recorded step does not "
                "run this Python again: do it in a hook (on_train_batch_end)."
            )
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
        fixed = {e.ordinal: e.options["compute"](e.leaves) for e in ordered if e.kind == "number" and not e.outputs}
        known = {path for path, _ in self.module.named_modules()}
        hidden = {path: metric for path, metric in self.metrics.items() if path not in known}
        effects = Effects(ordered, dict(self.results), frozenset(separate), frozenset(averaged), hidden, fixed)
        return recording, effects


def _merges_as_mean(effect: Effect, recording: Recording) -> bool:
    """Whether the value over the batch is the mean over the micro-batches, as the runtime merges scalars."""
    if not effect.is_mean:
        return False
    flat: Any = next(reversed(recording.graph.nodes)).args[0]  # type: ignore[call-overload]
    nodes = [flat[index] for index in effect.outputs.values()]
    ops = [op_of(node) for node in nodes if node.op != "get_attr"]
    return len(ops) == len(nodes) and all(op.shape == () and op.dtype and op.dtype.is_floating_point for op in ops)
