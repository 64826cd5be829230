"""One recorded run of a call on given leaves, and the settings that a failed run may change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn

from pipepart.recording.inputs import trees
from pipepart.recording.inputs.batching import Batching
from pipepart.recording.model_state import memos, state
from pipepart.recording.model_state.places import Place
from pipepart.recording.model_state.reachable import variables
from pipepart.recording.model_state.reads import Reads
from pipepart.recording.model_state.setup import Hooks, Setup
from pipepart.recording.model_state.side_effects import Effects
from pipepart.recording.proof.blame import Trace
from pipepart.recording.proof.outcome import Outcome, backward_roots, outcome_of
from pipepart.recording.recording import ExtraOutput, Input
from pipepart.recording.trace import caches, symbols
from pipepart.recording.trace.arguments import holds_tensors
from pipepart.recording.trace.caches import CachedFunction
from pipepart.recording.trace.contexts import contexts_refused
from pipepart.recording.trace.einops_calls import einops_recorded
from pipepart.recording.trace.facts import Fact, outside_rng
from pipepart.recording.trace.failures import DrawsOutside
from pipepart.recording.trace.functions import calls_kept_whole, library_functions, watch_makers
from pipepart.recording.trace.patches import (
    is_leaf,
    is_metric,
    keep_attributes,
    recording_patches,
    refuse_effects,
    refuse_hooks,
)
from pipepart.recording.trace.recorder import Recorder, RecordMode
from pipepart.recording.trace.transforms import transforms_recorded

__all__ = [
    "Call",
    "Retry",
    "Run",
    "RunFailed",
    "Settings",
    "copy_leaf",
    "eager",
    "found_caches",
    "keep_whole",
    "original",
    "remember",
    "run_once",
    "settle",
]

WHOLE_LIMIT = 0.4
"""A module that cannot be looked into is kept whole if it has at most this share of the parameters."""


@dataclass(frozen=True)
class Call:
    """What is to be recorded: how to run it on flat leaves, and what the leaves are.

    `run` returns the result and the extra outputs with their values.
    """

    root: nn.Module
    run: Callable[[list[Any]], tuple[Any, list[ExtraOutput]]]
    leaves: tuple[Any, ...]
    inputs: tuple[Input, ...]
    tree: trees.Tree
    step: str | None = None
    entries: tuple[Any, ...] = ()
    """Functions that the call begins with, to find the variables that its code uses."""
    batching: Batching | None = None
    """Which leaves hold the samples, if that is known."""
    others: tuple[tuple[Any, ...], ...] = ()
    """The leaves of other batches, for batches whose sizes cannot be changed by leaving rows out."""
    moved: list[int] = field(default_factory=list)
    """For each leaf of the last result the dimension that `run` has moved to the front."""

    @property
    def has_backward(self) -> bool:
        """Whether gradients matter: the steps of an evaluation have none."""
        return self.step in (None, "training_step")

    @property
    def what(self) -> str:
        name = type(self.root).__name__
        return f"{name}.{self.step}" if self.step else name


@dataclass
class Run:
    """Result of one recorded run. The values of the extra outputs are in the graph, except for modules."""

    recorder: Recorder
    output_tree: trees.Tree
    extras: list[ExtraOutput]
    output_count: int
    loss_index: int | None
    outcome: Outcome
    leaves: list[Any]


@dataclass
class Settings:
    whole: set[str] = field(default_factory=set)
    guards: bool = False
    compiling: bool = False
    settled: bool = False
    watching: bool = False
    single: str = ""
    """Why the model is recorded with one sample, as given: it does something else with more."""
    functions: list[Any] = field(default_factory=list)
    """Functions that are kept whole: they compute with numpy."""
    makers: bool = False
    """Whether to watch which function returns which numpy array."""
    caches: dict[int, list[CachedFunction]] = field(default_factory=dict)
    """Cached functions (lru_cache) that are called with sizes, by identity, and the places that refer to them."""
    tables: list[Any] = field(default_factory=list)
    """Dictionaries that the model fills by size."""
    suspects: list[Any] | None = None
    """Dictionaries that the model may have filled by size before; None: nobody has looked for them yet."""
    warm: bool = False
    """Whether the model was recorded again since something was set up in its first run."""
    history: list[str] = field(default_factory=list)
    variables: list[Place] | None = None
    """Variables of files and enclosing functions that the code can use."""

    def cached(self) -> list[CachedFunction]:
        """All places that refer to cached functions which are called with sizes."""
        return [place for places in self.caches.values() for place in places]


class Retry(Exception):
    """The settings were changed: record again."""


class RunFailed(Exception):
    def __init__(self, error: Exception, modules: list[str]):
        super().__init__(str(error))
        self.error, self.modules = error, modules


def keep_whole(root: nn.Module, path: str, settings: Settings, why: str) -> bool:
    if not path or path in settings.whole:
        return False
    total = sum(p.numel() for p in root.parameters()) or 1
    share = sum(p.numel() for p in root.get_submodule(path).parameters()) / total
    if share > WHOLE_LIMIT:
        settings.history.append(
            f"module {path!r} holds {share:.0%} of the parameters: too large to keep whole ({why[:160]})"
        )
        return False
    settings.whole.add(path)
    settings.history.append(f"kept {path!r} whole ({why[:160]})")
    return True


def remember(error: Exception, settings: Settings) -> None:
    """If a run has found dictionaries that the model fills by size, record again with them empty."""
    if isinstance(error, memos.Remembers) or settings.suspects:
        settings.tables += error.tables if isinstance(error, memos.Remembers) else ()
        settings.suspects = []
        raise Retry from None


def suspect(names: state.Names, settings: Settings) -> None:
    """Record once with all dictionaries empty that look as if they were filled by size, if there are any."""
    if settings.suspects is None:
        settings.suspects = memos.suspects(names.listed)
        if settings.suspects:
            raise Retry


def found_caches(run: Run, settings: Settings) -> bool:
    """Whether a run has called cached functions with sizes that were not known yet; they are from now on."""
    new: dict[int, list[CachedFunction]] = {}
    for place in (place for places in run.recorder.cached.values() for place in places):
        if id(place.function) not in settings.caches:
            new.setdefault(id(place.function), []).append(place)
    caches.forget([place for places in new.values() for place in places])
    settings.caches.update(new)
    return bool(new)


def eager(call: Call, leaves: list[Any], mode: Any) -> Any:
    with ExitStack() as stack:
        stack.enter_context(state.preserved(call.root))
        if mode is not None:
            stack.enter_context(mode)
        return call.run([copy_leaf(leaf) for leaf in leaves])


def original(call: Call, leaves: list[Any], mode: Any, backward: bool) -> Outcome:
    """What the model gives of itself, not recorded: outputs and extra outputs, and with `backward` its gradients."""
    with ExitStack() as stack:
        stack.enter_context(state.preserved(call.root))
        stack.enter_context(torch.enable_grad())
        if mode is not None:
            stack.enter_context(mode)
        given = [copy_leaf(leaf) for leaf in leaves]
        result, extras = call.run(list(given))
        outputs, tree = trees.flatten(result)
        flat = [*outputs, *(extra.value for extra in extras if not extra.is_module)]
        if mode is not None:
            return Outcome(flat)
        return outcome_of(flat, loss_index(tree, outputs), call.root, _by_name(call, given), backward)


def _by_name(call: Call, leaves: Sequence[Any]) -> dict[str, Any]:
    return {spec.name: leaf for spec, leaf in zip(call.inputs, leaves)}


def settle(call: Call, leaves: list[Any], mode: Any) -> None:
    """Call the model once and keep the plain attributes and hooks that it sets, as any call of the user's would."""
    with ExitStack() as stack:
        stack.enter_context(state.preserved(call.root))
        if mode is not None:
            stack.enter_context(mode)
        call.run([copy_leaf(leaf) for leaf in leaves])
        after = Setup(call.root.named_modules())
    after.put()


def copy_leaf(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    copy = leaf.detach().clone()
    if not leaf.requires_grad:
        return copy
    return copy.requires_grad_() if leaf.is_leaf else copy.requires_grad_().clone()


def run_once(
    call: Call,
    leaves: list[Any],
    names: state.Names,
    settings: Settings,
    mode: Any,
    backward: bool = False,
    trace: Trace | None = None,
) -> Run:
    """Record one run. With `backward` its gradients are taken too; a `trace` sees every value that is computed."""
    recorder = Recorder(call.root, names, frozenset(settings.whole), settings.guards, mode is not None)
    recorder.trace = trace
    with ExitStack() as stack:
        stack.enter_context(state.preserved(call.root, [module for _, module in names.listed]))
        stack.enter_context(torch.enable_grad())
        if mode is not None:
            stack.enter_context(mode)
        stack.enter_context(memos.emptied([*settings.tables, *(settings.suspects or ())]))
        values = []
        numbers: list[tuple[Place, Any]] = []
        for leaf, spec in zip(leaves, call.inputs):
            node = recorder.graph.placeholder(spec.name)
            recorder.facts[node] = Fact(varies=spec.kind != "constant")
            value = copy_leaf(leaf)
            if isinstance(value, torch.Tensor):
                recorder.bind(value, node)
            elif spec.kind == "number":
                recorder.facts[node].number = value
                value = symbols.StepNumber(value, recorder, partial(_itself, node), spec.place is not None)
                if spec.place is not None:
                    numbers.append((spec.place, value))
            values.append(value)
        recorder.has_state = bool(numbers)
        reads = Reads(names.modules, is_metric, lambda: recorder.recording and not recorder.frames, numbers)
        if settings.variables is None:
            settings.variables = variables(call.entries, names.listed)
        try:
            with ExitStack() as patches:
                patches.enter_context(recording_patches(recorder, names.listed, settings.compiling))
                patches.enter_context(calls_kept_whole(recorder, [*library_functions(), *settings.functions]))
                patches.enter_context(einops_recorded(recorder))
                patches.enter_context(transforms_recorded(recorder))
                patches.enter_context(contexts_refused(recorder))
                patches.enter_context(caches.bypassed(recorder, settings.cached()))
                patches.enter_context(RecordMode(recorder))
                if settings.makers:
                    patches.enter_context(watch_makers(recorder.makers, recorder.kept))
                recorder.watching, recorder.drawn = settings.watching, outside_rng()
                attributes, around = state.Attributes(names.listed), Effects(names.listed, partial(is_leaf, recorder))
                hooks = Hooks(names.listed)
                with reads.collecting(settings.variables):
                    result, extras = call.run(values)
                recorder.guards_of_state = reads.guards()
                recorder.notes += reads.notes
                if outside_rng() != recorder.drawn:
                    raise DrawsOutside("the model draws random numbers outside torch (Python's random or numpy)")
                memos.filled(recorder, attributes, around, settings.tables, settings.suspects or ())
                for table in settings.tables:
                    table.clear()
                keep_attributes(recorder, attributes)
                refuse_hooks(recorder, hooks)
                refuse_effects(recorder, around)
                outputs, tree = trees.flatten(result)
                count = len(outputs)
                flat = [*outputs, *(extra.value for extra in extras if not extra.is_module)]
                nodes = tuple(_output(recorder, value) for value in flat)
                recorder.recording = False
        except Exception as error:
            recorder.recording = False
            symbols.finish(recorder.numbers)
            raise RunFailed(error, recorder.failed_in or [""]) from error
        recorder.facts[recorder.graph.output(nodes)] = Fact()
        loss = loss_index(tree, outputs)
        if trace is not None and backward:
            trace.backward(*backward_roots(flat, loss))
        if backward:
            outcome = outcome_of(flat, loss, call.root, _by_name(call, values), True, retain=trace is not None)
        else:
            outcome = Outcome([value.detach() if isinstance(value, torch.Tensor) else value for value in flat])
        extras = [extra if extra.is_module else replace(extra, value=None) for extra in extras]
        recorder.release()
        return Run(recorder, tree, extras, count, loss, outcome, leaves)


def loss_index(tree: trees.Tree, outputs: Sequence[Any]) -> int | None:
    """Which leaf is the loss: the result itself, its ``loss``, its first leaf, or the only one that can be.

    A loss is a scalar that requires grad.
    """

    def is_loss(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dim() == 0 and value.requires_grad

    start = 0
    for key, child in zip(tree.keys, tree.children):
        if key == "loss" and child.leaves == 1 and is_loss(outputs[start]):
            return start
        start += child.leaves
    if outputs and is_loss(outputs[0]):
        return 0
    scalars = [i for i, value in enumerate(outputs) if is_loss(value)]
    return scalars[0] if len(scalars) == 1 else None


def _itself(node: fx.Node) -> fx.Node:
    return node


def _output(recorder: Recorder, value: Any) -> Any:
    """A leaf of the result as fx sees it; an object of a foreign class that holds tensors cannot be returned."""
    if isinstance(value, (torch.Tensor, nn.Module)) or symbols.is_tracked(value) or not hasattr(value, "__dict__"):
        return recorder.argument(value)
    if holds_tensors(value, 4):
        recorder.notes.append(
            f"the result holds a {type(value).__name__}, an object of its own with tensors inside: None is returned for it"
        )
        return None
    return recorder.argument(value)
