"""Effects of a recorded step: it logs, feeds metrics, fills containers and sets attributes.

A recorded step does not run the user's Python again. So its effects are noted while it is recorded, their tensors become
extra outputs of the recording, and `repeat_effects` repeats them after each step with the values of the whole batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torchmetrics import Metric

from pipepart.errors import CaptureError, ConfigError
from pipepart.lightning.attributes import attribute_setter, metric_setter, parts_watched
from pipepart.lightning.follows import Sizes, follows, shape_of, sizes_of
from pipepart.lightning.fresh_metrics import FreshMetric
from pipepart.lightning.lightning_step import Logs, detached, record_lightning_step, with_class
from pipepart.lightning.manual_step import ManualNotes
from pipepart.lightning.metrics import Later, NeedsValue, all_metrics, metric_members
from pipepart.lightning.noted_effects import Effect, Effects
from pipepart.lightning.outward import OUTWARD, checked, outward_noted
from pipepart.lightning.said_lines import SaidLines
from pipepart.lightning.watched_containers import Path, Touched, text_of, watched_containers
from pipepart.lightning.written_files import files_refused
from pipepart.recording import ExtraOutput, Recording
from pipepart.recording.inputs import trees
from pipepart.recording.inputs.batching import Batching
from pipepart.recording.model_state.places import Place, is_plain_value
from pipepart.recording.model_state.reachable import variables
from pipepart.recording.model_state.reads import active
from pipepart.recording.op import op_of
from pipepart.recording.recorded_run.contexts import user_line
from pipepart.recording.recorded_run.failures import Unsettled, Updates
from pipepart.recording.recorded_run.symbols import Tracked, atoms_of, is_tracked, plain, value_from
from pipepart.recording.recorded_run.texts import Mark, Texts, has_marks, parts_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

__all__ = ["record_with_effects"]

_KEY = "pipepart_effect"
"""The name under which an extra output has its effect, and the position of its value in the effect (None: no value)."""
_ACT = "act"
"""An act of manual optimization. It is part of the recording, so that all ranks notice if theirs differ; `ManualNotes`
repeats it."""


def record_with_effects(
    module: LightningModule, step: str, batch: Any, *, batching: Batching | None = None, **options: Any
) -> tuple[Recording, Effects, ManualNotes | None]:
    """Record a step, its effects and its acts. The options are those of `record_lightning_step`."""
    fresh: set[str] = set()
    filled: list[Place] | None = None
    converting, marking, first = False, False, None
    said = SaidLines()
    while True:
        watch = _Watch(module, step, batching, fresh, Texts(marking), said, filled or ())
        try:
            with watch.installed():
                recording = record_lightning_step(
                    module, step, batch, batching=batching, logs=watch, converting=converting, **options
                )
        except NeedsValue as need:  # once for each metric
            fresh.add(need.path)
            continue
        except CaptureError as error:
            if filled is None and _fills_variable(error):
                filled = variables((getattr(module, step),), module.named_modules())
                continue
            if first is not None:  # it does not take marks; refused here, if its texts differ
                watch, recording = first
                return *watch.finish(recording), watch.manual
            if converting:
                watch.check_decided()
            if converting or not watch.undecided:
                raise
            converting, marking = (
                True,
                watch.texts.seen,
            )  # a value that Python decides may be what differs between sizes
            said = SaidLines()
            continue
        again = watch.undecided or (watch.reaches_out and watch.texts.seen)
        if converting or not again:
            return *watch.finish(recording), watch.manual
        converting, marking, first = True, watch.texts.seen, (watch, recording)
        said = SaidLines()


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
        texts: Texts,
        said: SaidLines,
        filled: Sequence[Place] = (),
    ) -> None:
        """`fresh` are the metrics whose values the step computes with; `filled` are variables that it may fill."""
        super().__init__()
        self.texts, self._said, self.reaches_out = texts, said, False
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
        self.parts = {id(part): path for path, part in module.named_modules() if path}
        self.repeated: frozenset[tuple[str, str]] = frozenset()
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
                setter = metric_setter(self, path, type(metric).__setattr__)
                stack.enter_context(with_class(metric, {**members_, "__setattr__": setter}))
            stack.enter_context(parts_watched(self))
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
        reads = active()
        self._said.begin(reads is not None)
        if reads is not None:
            self.repeated = reads.repeated
        try:
            with watched_containers(module, self), outward_noted(self), files_refused(), self.texts.collecting():
                yield
            self._check_given()
            if active() is not None:
                self.leads = self.counted  # not those of a run that has failed, at a size that the model does not take
        finally:
            self.is_running = False

    def log(self, name: str, value: Any, options: dict[str, Any]) -> None:
        name = self._settled(name)
        if "batch_size" in options:
            options = {**options, "batch_size": self._known(options["batch_size"])}
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

    def outward(self, name: str, value: Any, options: dict[str, Any]) -> None:
        self.reaches_out = True
        checked(name, value)
        self.note(OUTWARD, name, value, options)

    def said(self, name: str, value: Any, options: dict[str, Any]) -> None:
        self.reaches_out = True
        self._said.add(name, value, options, self.count)

    def set_on_trainer(self, name: str, value: bool) -> None:
        self.note("trainer", name, value)

    def returned(self, result: Any) -> Any:
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if self.trains and isinstance(loss, Later):
            loss.needed()
        leaves, tree = trees.flatten(result)
        leaves = self._known_later(leaves)
        for position, (path, leaf) in enumerate(zip(trees.leaf_paths(tree), leaves)):
            self._decide((-1, f"the step returns {path or 'a value'}", position), leaf)
        if active() is not None:
            self.results = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Later)}
        return trees.unflatten([0.0 if isinstance(leaf, Later) else leaf for leaf in leaves], tree)

    def note(self, kind: str, target: str, value: Any, options: dict[str, Any] | None = None) -> int:
        """Note an effect and return its number. Computed leaves become extra outputs, constants stay in the effect."""
        reads = active()
        if reads is not None and not reads.watching and kind != _ACT:
            raise Updates(
                f"a module that is kept whole changes {target} at {user_line()}: it would do so once for each micro-batch, on "
                "its own stage. Do so in the step, or in a hook"
            )
        leaves, tree = trees.flatten(self._keys_settled(value) if self.texts.marks else value)
        leaves = self._known_later(leaves)
        effect = Effect(kind, target, self.count, tree, options=options or {})
        self.count += 1
        self._add(effect, leaves)
        return effect.ordinal

    def _add(self, effect: Effect, leaves: list[Any]) -> None:
        extras = []
        name = effect.target if effect.kind == OUTWARD else f"{effect.kind} {effect.target}"
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
        found = [self._known_leaf(leaf) for leaf in leaves]
        self.counted.append(len(self.extras) - count)
        return found

    def _known_leaf(self, leaf: Any) -> Any:
        if is_tracked(leaf):
            return self._number(leaf)
        if isinstance(leaf, (list, tuple)) and any(has_marks(item) for item in leaf):  # a list of texts is one leaf
            return Later.joined([self._known_leaf(item) for item in leaf], type(leaf))
        if not has_marks(leaf):
            return leaf
        return Later.joined(parts_of(leaf, self._marked), "".join)

    def _marked(self, mark: Mark) -> Later:
        value = self._tensor(mark.value) if isinstance(mark.value, torch.Tensor) else self._number(mark.value)
        return value.then(mark.text)

    def _known(self, value: Any) -> Any:
        """A number or a tensor that is an option of an effect, as a value that is known after the step."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        return self._known_later([value])[0]

    def _settled(self, text: Any) -> Any:
        """A name without marks: it holds for the present values."""
        return "".join(parts_of(text, lambda m: m.text(_now(m.value)))) if has_marks(text) else text

    def _keys_settled(self, value: Any) -> Any:
        """A value whose dicts have keys without marks."""
        if type(value) is dict:
            return {self._settled(key): self._keys_settled(item) for key, item in value.items()}
        return type(value)(map(self._keys_settled, value)) if type(value) in (list, tuple) else value

    def _tensor(self, tensor: torch.Tensor) -> Later:
        """The value of a tensor after the step."""
        effect = Effect("number", "", self.count, options={"compute": itemgetter(0)})
        self.count += 1
        self._add(effect, [tensor])
        return Later.of(effect.ordinal, "a tensor")

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
        key = self._settled(key) if isinstance(key, str) else key
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

    def check_decided(self) -> None:
        """Refuse values that Python has decided differently in two runs."""
        if self.undecided:
            name, (a, b) = next(iter(self.undecided.items()))
            raise CaptureError(
                f"{name}: two runs of the step on one state gave {a!r} and {b!r}, so it is no number or tensor that the "
                "graph computes (a clock, a random number of Python, a text made of a loss). A recorded step does not "
                "run this Python again: do it in a hook (on_train_batch_end). A text with values can be an f-string, which is "
                "made again in each step."
            )

    def finish(self, recording: Recording) -> tuple[Recording, Effects]:
        """The recording, without guards on containers that the step only fills, and its effects."""
        self.check_decided()
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
        ordered = self._said.among(ordered, self.module)
        fixed = {e.ordinal: e.options["compute"](e.leaves) for e in ordered if e.kind == "number" and not e.outputs}
        known = {path for path, _ in self.module.named_modules()}
        hidden = {path: metric for path, metric in self.metrics.items() if path not in known}
        effects = Effects(ordered, dict(self.results), frozenset(separate), frozenset(averaged), hidden, fixed)
        return recording, effects


def _now(value: Any) -> Any:
    """The present value of a number of the step, or a size, for which the recording then holds."""
    if isinstance(value, torch.Tensor) or (is_tracked(value) and value.from_data):
        raise CaptureError(
            f"the step makes a name or a key of a value of the batch, at {user_line()}. A recorded step has fixed names: do so "
            "in a hook (on_train_batch_end)."
        )
    return value.concrete() if isinstance(value, Tracked) and hasattr(value, "concrete") else plain(value)


def _merges_as_mean(effect: Effect, recording: Recording) -> bool:
    """Whether the value over the batch is the mean over the micro-batches, as the runtime merges scalars."""
    if not effect.is_mean:
        return False
    flat: Any = next(reversed(recording.graph.nodes)).args[0]  # type: ignore[call-overload]
    nodes = [flat[index] for index in effect.outputs.values()]
    ops = [op_of(node) for node in nodes if node.op != "get_attr"]
    return len(ops) == len(nodes) and all(op.shape == () and op.dtype and op.dtype.is_floating_point for op in ops)
