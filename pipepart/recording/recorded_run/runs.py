"""One recorded run of a call on given leaves, and the settings that fallbacks change between runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn as nn

from pipepart.recording.inputs import trees
from pipepart.recording.inputs.batching import Batching
from pipepart.recording.model_state import memos, state
from pipepart.recording.model_state.places import Place
from pipepart.recording.model_state.reachable import variables
from pipepart.recording.model_state.reads import Reads
from pipepart.recording.model_state.side_effects import Effects
from pipepart.recording.proof.blame import SeenValues
from pipepart.recording.proof.outcome import Outcome, backward_roots, outcome_of
from pipepart.recording.recorded import ExtraOutput, Input
from pipepart.recording.recorded_run import ops, symbols
from pipepart.recording.recorded_run.caches import CachedFunction
from pipepart.recording.recorded_run.contexts import outside_rng
from pipepart.recording.recorded_run.failures import DrawsOutside
from pipepart.recording.recorded_run.functions import library_functions, watch_makers
from pipepart.recording.recorded_run.patches import recording_patches
from pipepart.recording.recorded_run.python_state import keep_attributes, refuse_effects, refuse_hooks
from pipepart.recording.recorded_run.recorder import Recorder, RecordMode
from pipepart.recording.recorded_run.tensors import holds_tensors

__all__ = [
    "Call",
    "Run",
    "RunFailed",
    "Settings",
    "copy_leaf",
    "eager",
    "original",
    "run_once",
]


@dataclass(frozen=True)
class Call:
    """The call to record: how to run it on flat leaves, and the description of the leaves.

    `run` returns the result and the extra outputs with their values.
    """

    root: nn.Module
    run: Callable[[list[Any]], tuple[Any, list[ExtraOutput]]]
    leaves: tuple[Any, ...]
    inputs: tuple[Input, ...]
    tree: trees.Tree
    step: str | None = None
    entries: tuple[Any, ...] = ()
    """Functions that the call starts with, to find the variables that its code uses."""
    batching: Batching | None = None
    """Leaves that hold the samples, if known."""
    others: tuple[tuple[Any, ...], ...] = ()
    """Leaves of other batches, for batches whose sizes cannot be changed by leaving rows out."""
    moved: list[int] = field(default_factory=list)
    """Dimension that `run` has moved to the front, for each leaf of the last result."""

    @property
    def has_backward(self) -> bool:
        """Whether gradients are computed: steps of an evaluation have none."""
        return self.step in (None, "training_step")

    @property
    def what(self) -> str:
        """Name of the model and the step."""
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
    """Settings with which a call is recorded. A fallback changes a setting, and the call is recorded again."""

    whole: set[str] = field(default_factory=set)
    """Modules that are kept whole, by path."""
    opened: set[str] = field(default_factory=set)
    """Modules whose ops are recorded although they could be one op, by path."""
    guards: bool = False
    """Whether Python may branch on the contents of a tensor, with a check in the graph."""
    converting: bool = False
    """Whether ``float(x)`` and ``int(x)`` give tracked numbers."""
    compiling: bool = False
    """Whether libraries are told that they are being compiled."""
    settled: bool = False
    """Whether the recording starts from the state that one call leaves."""
    initial: dict[tuple[str, str], Any] = field(default_factory=dict)
    """Plain attributes of modules before anything was run, by path and name."""
    attributes: set[tuple[str, str]] = field(default_factory=set)
    """Plain attributes of submodules that change in each call, by path and name: the caller sets them after each call."""
    watching: bool = False
    """Whether each module is checked for draws of random numbers outside torch."""
    single: str = ""
    """Reason why the model is recorded with the one sample of the example: with more samples, it computes other ops."""
    functions: list[Any] = field(default_factory=list)
    """Functions that are kept whole: they compute with numpy."""
    makers: bool = False
    """Whether to note the function that returns each numpy array."""
    caches: dict[int, list[CachedFunction]] = field(default_factory=dict)
    """Cached functions (lru_cache) that are called with sizes, by identity, and the places that refer to them."""
    tables: list[Any] = field(default_factory=list)
    """Dictionaries that the model fills by size."""
    suspects: list[Any] | None = None
    """Dictionaries that the model may have filled by size before; None: not searched yet."""
    warm: bool = False
    """Whether the model was recorded again because its first run may have set something up."""
    history: list[str] = field(default_factory=list)
    """Fallbacks that were tried, in words."""
    variables: list[Place] | None = None
    """Variables of files and enclosing functions that the code can use; None: not searched yet."""

    def cached(self) -> list[CachedFunction]:
        """Return all places that refer to cached functions which are called with sizes."""
        return [place for places in self.caches.values() for place in places]


class RunFailed(Exception):
    """A run has failed with `error`, inside `modules` (paths, the innermost last)."""

    def __init__(self, error: Exception, modules: list[str]):
        super().__init__(str(error))
        self.error, self.modules = error, modules


def eager(call: Call, leaves: list[Any], mode: Any) -> Any:
    """Run the model once, not recorded; buffers, gradients and random state stay as they are."""
    with state.preserved(call.root), mode or nullcontext():
        return call.run([copy_leaf(leaf) for leaf in leaves])


def original(call: Call, leaves: list[Any], mode: Any, backward: bool) -> Outcome:
    """Run the model, not recorded, and return its outputs, extra outputs and, with `backward`, gradients."""
    with state.preserved(call.root), torch.enable_grad(), mode or nullcontext():
        given = [copy_leaf(leaf) for leaf in leaves]
        result, extras = call.run(list(given))
        outputs, tree = trees.flatten(result)
        flat = [*outputs, *(extra.value for extra in extras if not extra.is_module)]
        if mode is not None:
            return Outcome(flat)
        return outcome_of(flat, loss_index(tree, outputs), call.root, _by_name(call, given), backward)


def _by_name(call: Call, leaves: Sequence[Any]) -> dict[str, Any]:
    return {spec.name: leaf for spec, leaf in zip(call.inputs, leaves)}


def copy_leaf(leaf: Any) -> Any:
    """Return a copy of an input that requires a gradient, and is a leaf of autograd's graph, as the input does."""
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
    seen: SeenValues | None = None,
) -> Run:
    """Record one run. With `backward`, compute its gradients too; `seen` keeps every value that is computed."""
    recorder = Recorder(call.root, names, frozenset(settings.whole), settings.guards, mode is not None)
    recorder.builder.seen = seen
    recorder.numbers.converting, recorder.opened = settings.converting, frozenset(settings.opened)
    with ExitStack() as stack:
        stack.enter_context(state.preserved(call.root, [module for _, module in names.listed]))
        stack.enter_context(torch.enable_grad())
        if mode is not None:
            stack.enter_context(mode)
        stack.enter_context(memos.emptied([*settings.tables, *(settings.suspects or ())]))
        values, numbers = _inputs(recorder, call, leaves)
        reads = Reads(names.modules, ops.is_metric, lambda: not recorder.builder.idle, numbers)
        reads.repeated = frozenset(settings.attributes)
        if settings.variables is None:
            settings.variables = variables(call.entries, names.listed)
        try:
            with _recorded(recorder, names, settings):
                result, extras = _result(recorder, call, values, reads, names, settings)
                outputs, tree = trees.flatten(result)
                count = len(outputs)
                flat = [*outputs, *(extra.value for extra in extras if not extra.is_module)]
                nodes = tuple(_output(recorder, value) for value in flat)
        except Exception as error:
            recorder.numbers.finish()
            raise RunFailed(error, recorder.failed_in or [""]) from error
        recorder.builder.output(nodes)
        loss = loss_index(tree, outputs)
        if seen is not None and backward:
            seen.backward(*backward_roots(flat, loss))
        if backward:
            outcome = outcome_of(flat, loss, call.root, _by_name(call, values), True, retain=seen is not None)
        else:
            outcome = Outcome([value.detach() if isinstance(value, torch.Tensor) else value for value in flat])
        extras = [extra if extra.is_module else replace(extra, value=None) for extra in extras]
        recorder.numbers.finish()
        recorder.builder.release()
        return Run(recorder, tree, extras, count, loss, outcome, leaves)


def _inputs(recorder: Recorder, call: Call, leaves: Sequence[Any]) -> tuple[list[Any], list[tuple[Place, Any]]]:
    """Make the inputs of the graph; return their values in the run, and the places of those in the Python state."""
    values, numbers = [], []
    for leaf, spec in zip(leaves, call.inputs):
        node = recorder.builder.placeholder(spec.name, varies=spec.kind != "constant")
        value = copy_leaf(leaf)
        if isinstance(value, torch.Tensor):
            with torch._C.DisableTorchFunction():
                recorder.builder.bind(value, node)
        elif spec.kind == "number":
            value = recorder.numbers.input(node, value, of_state=spec.place is not None)
            if spec.place is not None:
                numbers.append((spec.place, value))
        values.append(value)
    recorder.has_state = bool(numbers)
    return values, numbers


@contextmanager
def _recorded(recorder: Recorder, names: state.Names, settings: Settings) -> Iterator[None]:
    """Send all calls to the recorder."""
    with ExitStack() as stack:
        whole = [*library_functions(), *settings.functions]
        stack.enter_context(recording_patches(recorder, names.listed, whole, settings.cached(), settings.compiling))
        stack.enter_context(RecordMode(recorder))
        if settings.makers:
            stack.enter_context(watch_makers(recorder.makers, recorder.builder.kept))
        recorder.watching, recorder.drawn = settings.watching, outside_rng()
        yield


def _result(
    recorder: Recorder, call: Call, values: list[Any], reads: Reads, names: state.Names, settings: Settings
) -> Any:
    """Run the call, and record or refuse its changes of Python state; return its result and its extra outputs."""
    before = state.Snapshot(names.listed)
    around = Effects(names.listed, recorder.is_one_op)
    with reads.collecting(settings.variables or []):
        result = call.run(values)
    recorder.guards_of_state = reads.guards()
    recorder.notes += reads.notes
    if outside_rng() != recorder.drawn:
        raise DrawsOutside("the model draws random numbers outside torch (Python's random or numpy)")
    memos.filled(recorder, before, around, settings.tables, settings.suspects or ())
    for table in settings.tables:
        table.clear()
    keep_attributes(recorder, before, settings.attributes)
    refuse_hooks(recorder, before)
    refuse_effects(recorder, around)
    return result


def loss_index(tree: trees.Tree, outputs: Sequence[Any]) -> int | None:
    """Return the position of the loss: the result itself, its ``loss``, its first leaf, or the only candidate.

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


def _output(recorder: Recorder, value: Any) -> Any:
    """Return a leaf of the result in the form of fx; None for an object of another class that holds tensors."""
    if isinstance(value, (torch.Tensor, nn.Module)) or symbols.is_tracked(value) or not hasattr(value, "__dict__"):
        return recorder.builder.argument(value)
    if holds_tensors(value, 4):
        recorder.notes.append(
            f"the result holds a {type(value).__name__} with tensors inside, which a recording cannot return: it returns None "
            "instead"
        )
        return None
    return recorder.builder.argument(value)
