"""Record a module or a function: run it on the example, at several sizes, until the graph is right for all of them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn

from pipepart.capture import state, symbols, trees, variants
from pipepart.capture.annotate import annotate
from pipepart.capture.explain import Explanation, explain, put_back
from pipepart.capture.patches import keep_attributes, outside_rng, recording_patches
from pipepart.capture.recorder import DataDependent, Fact, NotRecordable, Recorder, RecordMode
from pipepart.capture.recording import ANY, Input, LogCall, Recording
from pipepart.capture.simplify import simplify
from pipepart.capture.verify import verify
from pipepart.errors import CaptureError

__all__ = ["Call", "record", "record_call"]

WHOLE_LIMIT = 0.4
"""A module that cannot be looked into is kept whole if it has at most this share of the parameters."""


@dataclass(frozen=True)
class Call:
    """What is to be recorded: how to run it on flat leaves, and what the leaves are.

    `run` returns the result and the logged values, a list of (name, value, options).
    """

    root: nn.Module
    run: Callable[[list[Any]], tuple[Any, list[tuple[str, Any, dict[str, Any]]]]]
    leaves: tuple[Any, ...]
    inputs: tuple[Input, ...]
    tree: trees.Tree
    step: str | None = None

    @property
    def what(self) -> str:
        name = type(self.root).__name__
        return f"{name}.{self.step}" if self.step else name


@dataclass
class _Run:
    recorder: Recorder
    outputs: list[Any]
    output_tree: trees.Tree
    logs: list[tuple[str, Any, dict[str, Any]]]
    output_count: int
    tensors: list[Any]
    leaves: list[Any]


@dataclass
class _Settings:
    whole: set[str] = field(default_factory=set)
    guards: bool = False
    compiling: bool = False
    history: list[str] = field(default_factory=list)


def record(
    target: nn.Module | Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    root: nn.Module | None = None,
) -> Recording:
    """Record a module, a bound method of a module, or a function that uses the modules of `root`.

    It is run on the example in the current mode (train or eval); buffers, gradients and random state stay as they are.
    """
    if isinstance(target, nn.Module):
        root = root or target
    elif root is None:
        root = getattr(target, "__self__", None)
        if not isinstance(root, nn.Module):
            raise CaptureError(f"record({target!r}): give root=, the module whose parameters the function uses")
    leaves, tree = trees.flatten((tuple(args), dict(kwargs or {})))
    paths = [_short_path(target, path) for path in trees.leaf_paths(tree)]
    inputs = tuple(describe_leaf(leaf, path, numbers=False) for leaf, path in zip(leaves, paths))

    def run(values: list[Any]) -> tuple[Any, list[Any]]:
        given, named = trees.unflatten(values, tree)
        return target(*given, **named), []

    return record_call(Call(root, run, tuple(leaves), inputs, tree))


def describe_leaf(leaf: Any, path: str, numbers: bool) -> Input:
    """The `Input` of one leaf. With `numbers`, Python numbers may change from call to call."""
    name = "".join(c if c.isalnum() else "_" for c in path).strip("_") or "x"
    name = name if not name[0].isdigit() else f"x_{name}"
    if isinstance(leaf, torch.Tensor):
        return Input(name, path, "tensor", tuple(leaf.shape), leaf.dtype, None, (False,) * leaf.dim())
    if numbers and isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
        return Input(name, path, "number")
    return Input(name, path, "constant", value=leaf)


def _short_path(target: Any, path: str) -> str:
    """``[0][1]['x']`` (of args and kwargs) with the name of the parameter in front."""
    head, _, rest = path[1:].partition("]")
    key, _, tail = rest[1:].partition("]")
    if head == "1":
        return key.strip("'\"") + tail
    try:
        function = target.forward if isinstance(target, nn.Module) else target
        parameters = list(inspect.signature(function).parameters.values())
        parameter = parameters[int(key)]
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            return parameter.name + tail
    except (TypeError, ValueError, IndexError):
        pass
    return f"args[{key}]{tail}"


def record_call(call: Call) -> Recording:
    """Record a call; modules that resist are kept whole, one by one, before giving up."""
    with ExitStack() as stack:
        mode = stack.enter_context(state.stand_ins(call.root)) if state.is_abstract(call.root) else None
        names = state.names_of(call.root)
        leaves = [_fake(leaf, mode) for leaf in call.leaves]
        settings = _Settings()
        while True:
            try:
                return _record(call, leaves, names, settings, mode)
            except _Retry:
                continue


class _Retry(Exception):
    """The settings were changed: record again."""


def _fake(leaf: Any, mode: Any) -> Any:
    if mode is None or not isinstance(leaf, torch.Tensor):
        return leaf
    with mode:
        made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu")
        return made.requires_grad_() if leaf.requires_grad else made


def _record(call: Call, leaves: list[Any], names: state.Names, settings: _Settings, mode: Any) -> Recording:
    dims = variants.dimensions(leaves)
    batch = dims[0] if dims else None
    base_leaves = leaves
    if batch is not None and batch.size == 1:  # size 1 broadcasts: nothing can be learned from it
        try:
            base_leaves = variants.resize(leaves, batch, 2)
            with torch.no_grad():
                _eager(call, base_leaves, mode)
            batch = variants.Dimension(2, batch.places, True)
        except Exception:
            base_leaves, batch = leaves, None
    base = _attempt(call, base_leaves, names, settings, mode)
    study = _Study(call, base_leaves, base, names, settings, mode)
    if batch is not None:
        study.vary(batch)
    failed = [dim for dim in dims[1:] if not study.vary(dim)]
    ignored = study.ignored_strings()
    for dim in variants.together(failed):
        study.vary(dim)
    nodes = list(base.recorder.graph.nodes)
    simplify([run.recorder for run in study.runs])
    for (index, position), explanation in study.explained.items():
        put_back(base.recorder, nodes[index], position, explanation)
    inputs = tuple(
        _with_dynamic(dataclasses.replace(spec, value=ANY) if i in ignored else spec, i, study.proved)
        for i, spec in enumerate(call.inputs)
    )
    equal = tuple(dim.places for dim in study.proved if len(dim.places) > 1)
    return _recording(call, leaves, base, inputs, equal, settings, study.notes(dims[1:]), mode)


class _Study:
    """The example at other sizes: which dimensions are free, and which constants follow them."""

    def __init__(self, call: Call, leaves: list[Any], base: _Run, names: state.Names, settings: _Settings, mode: Any):
        self.call, self.leaves, self.base = call, leaves, base
        self.names, self.settings, self.mode = names, settings, mode
        self.runs = [base]
        self.proved: list[variants.Dimension] = []
        self.explained: dict[tuple[int, int], Explanation] = {}
        self.reasons: dict[variants.Dimension, str] = {}

    def vary(self, dim: variants.Dimension) -> bool:
        """Record at another size of `dim`; True if the graph is the same there."""
        reason = ""
        elements = sum(leaf.numel() for leaf in self.leaves if isinstance(leaf, torch.Tensor))
        for size in dim.candidates(elements):
            try:
                run = self._run(dim, size)
            except Exception as error:
                reason = f"fails at size {size} ({str(error)[:160]})"
                continue
            mismatch, numbers = self._compare(run)
            if mismatch is None and numbers:
                mismatch = self._explain(dim, size, numbers)
            if mismatch is None:
                self.runs.append(run)
                self.proved.append(dim)
                return True
            reason = f"at sizes {dim.size} and {size}: {mismatch.text}"
            if dim.is_batch:
                self._baked_in(mismatch.module, reason)
        self.reasons[dim] = reason
        return False

    def ignored_strings(self) -> set[int]:
        """Inputs that are text (names of samples) and have no influence: another text gives the same graph."""
        texts = {i for i, leaf in enumerate(self.leaves) if _is_text(leaf)}
        if not texts or self.call.step is None:
            return set()
        changed = [_other_text(leaf) if i in texts else leaf for i, leaf in enumerate(self.leaves)]
        try:
            run = _run(self.call, changed, self.names, self.settings, self.mode)
        except Exception:
            return set()
        mismatch, numbers = self._compare(run)
        return set() if mismatch is not None or numbers else texts

    def notes(self, dims: Sequence[variants.Dimension]) -> list[str]:
        """What is fixed and why."""
        free = {place for dim in self.proved for place in dim.places}
        return [
            f"{'batch size' if dim.is_batch else f'dimension of size {dim.size}'}: fixed; the model {reason}"
            for dim, reason in self.reasons.items()
            if not set(dim.places) <= free
        ]

    def _run(self, dim: variants.Dimension, size: int) -> _Run:
        changed = variants.resize(self.leaves, dim, size)
        return _run(self.call, changed, self.names, self.settings, self.mode)

    def _compare(self, run: _Run) -> tuple[variants.Mismatch | None, list[variants.Difference]]:
        known: variants.Known = {
            key: (lambda recorder, value, e=e: e.holds(variants.size_in(recorder, e.dimension), value))
            for key, e in self.explained.items()
        }
        mismatch, numbers = variants.compare(self.base.recorder, run.recorder, known)
        if mismatch is None and trees_differ(self.base, run):
            mismatch = variants.Mismatch("", "the result or what is logged has another structure")
        return mismatch, numbers

    def _explain(
        self, dim: variants.Dimension, size: int, numbers: list[variants.Difference]
    ) -> variants.Mismatch | None:
        """Find laws for numbers that changed with `dim`, and try them at a third size."""
        first = numbers[0]
        failure = variants.Mismatch(first.module, first.text)
        laws = {(n.node, n.position): explain(dim, n.value, size, n.other) for n in numbers}
        third = next(
            (s for s in (*dim.candidates(), dim.size + 2, 2 * dim.size + 1) if s not in (dim.size, size)), None
        )
        if third is None or not all(laws.values()):
            return failure
        try:
            run = self._run(dim, third)
        except Exception:
            return failure
        mismatch, seen = variants.compare(self.base.recorder, run.recorder, {})
        if mismatch is not None:
            return mismatch
        values = {(n.node, n.position): n.other for n in seen}
        for key, options in laws.items():
            holding = [law for law in options if key in values and law.holds(third, values[key])]
            if not holding:
                return failure
            self.explained[key] = holding[0]
        return None

    def _baked_in(self, module: str, reason: str) -> None:
        if _keep_whole(self.call.root, module, self.settings, reason):
            raise _Retry
        raise CaptureError(
            f"{self.call.what} depends on the batch size in a way that cannot be recorded.\n  {reason}\n"
            "  do: compute sizes from tensors (x.shape[0], not Python copies of it) or put this part into a "
            "submodule of its own, which is then kept whole"
        )


def _is_text(leaf: Any) -> bool:
    return isinstance(leaf, str) or (type(leaf) in (list, tuple) and all(type(item) is str for item in leaf))


def _other_text(leaf: Any) -> Any:
    return f"{leaf}~" if isinstance(leaf, str) else type(leaf)(f"{item}~" for item in leaf)


def trees_differ(a: _Run, b: _Run) -> bool:
    """Whether two runs returned or logged differently."""
    return a.output_tree != b.output_tree or [log[0] for log in a.logs] != [log[0] for log in b.logs]


def _attempt(call: Call, leaves: list[Any], names: state.Names, settings: _Settings, mode: Any) -> _Run:
    """Record once; on failure change the settings and ask for a new attempt, or say why it cannot be done."""
    try:
        return _run(call, leaves, names, settings, mode)
    except _RunFailed as failed:
        error = failed.error
        if isinstance(error, CaptureError) and not isinstance(error, NotRecordable):
            raise error from None
        text = f"{type(error).__name__}: {error}"
        if not isinstance(error, CaptureError):
            _eager(call, leaves, mode)  # if the model itself fails on the example, that error is the user's
        for path in reversed(failed.modules):
            if path and _keep_whole(call.root, path, settings, text):
                raise _Retry from None
            if path and path not in settings.whole:
                break
        if isinstance(error, DataDependent) and not settings.compiling:
            settings.compiling = True
            raise _Retry from None
        if isinstance(error, DataDependent) and not settings.guards:
            settings.guards = True
            raise _Retry from None
        where = next((path for path in reversed(failed.modules) if path), "")
        raise CaptureError(
            f"{call.what} cannot be recorded.\n  where: module {where!r}\n  what: {text}\n"
            + "".join(f"  tried: {item}\n" for item in settings.history[-3:])
            + "  do: put this part into a submodule with at most 40 % of the parameters (it is then kept whole), or "
            "write it with tensor ops"
        ) from error


class _RunFailed(Exception):
    def __init__(self, error: Exception, modules: list[str]):
        super().__init__(str(error))
        self.error, self.modules = error, modules


def _keep_whole(root: nn.Module, path: str, settings: _Settings, why: str) -> bool:
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


def _eager(call: Call, leaves: list[Any], mode: Any) -> Any:
    with ExitStack() as stack:
        stack.enter_context(state.preserved(call.root))
        if mode is not None:
            stack.enter_context(mode)
        return call.run([_copy(leaf) for leaf in leaves])


def _copy(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    copy = leaf.detach().clone()
    return copy.requires_grad_() if leaf.requires_grad else copy


def _run(call: Call, leaves: list[Any], names: state.Names, settings: _Settings, mode: Any) -> _Run:
    recorder = Recorder(call.root, names, frozenset(settings.whole), settings.guards, mode is not None)
    with ExitStack() as stack:
        stack.enter_context(state.preserved(call.root))
        stack.enter_context(torch.enable_grad())
        if mode is not None:
            stack.enter_context(mode)
        values = []
        for leaf, spec in zip(leaves, call.inputs):
            node = recorder.graph.placeholder(spec.name)
            recorder.facts[node] = Fact(varies=spec.kind != "constant")
            value = _copy(leaf)
            if isinstance(value, torch.Tensor):
                recorder.bind(value, node)
            elif spec.kind == "number":
                recorder.facts[node].number = value
                value = symbols.StepNumber(value, recorder, lambda node=node: node)
            values.append(value)
        try:
            with recording_patches(recorder, settings.compiling), RecordMode(recorder):
                drawn, attributes = outside_rng(), state.Attributes(call.root)
                result, logs = call.run(values)
                if outside_rng() != drawn:
                    raise NotRecordable("the model draws random numbers outside torch (Python's random or numpy)")
                keep_attributes(recorder, attributes)
                outputs, tree = trees.flatten(result)
                count = len(outputs)
                logs = [(name, value, _plain_options(options)) for name, value, options in logs]
                flat = [*outputs, *(value for _, value, _ in logs if not isinstance(value, nn.Module))]
                nodes = tuple(_output(recorder, value) for value in flat)
                recorder.recording = False
        except Exception as error:
            recorder.recording = False
            raise _RunFailed(error, recorder.failed_in or [""]) from error
        recorder.facts[recorder.graph.output(nodes)] = Fact()
        return _Run(recorder, list(nodes), tree, logs, count, flat, leaves)


def _plain_options(options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a log call as constants; a batch size that follows the batch is left to whoever replays it."""
    return {
        key: symbols.plain(value)
        for key, value in options.items()
        if not (key == "batch_size" and symbols.is_tracked(value))
    }


def _output(recorder: Recorder, value: Any) -> Any:
    """A leaf of the result as fx sees it; an object of a foreign class that holds tensors cannot be returned."""
    if isinstance(value, (torch.Tensor, nn.Module)) or symbols.is_tracked(value) or not hasattr(value, "__dict__"):
        return recorder.argument(value)
    if _holds_tensors(value, 4):
        recorder.notes.append(
            f"the result holds a {type(value).__name__}, an object of its own with tensors inside: None is returned for it"
        )
        return None
    return recorder.argument(value)


def _holds_tensors(value: Any, depth: int) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if depth == 0:
        return False
    if isinstance(value, (list, tuple)):
        return any(_holds_tensors(item, depth - 1) for item in value)
    if isinstance(value, dict):
        return any(_holds_tensors(item, depth - 1) for item in value.values())
    if isinstance(value, (type, nn.Module)) or not hasattr(value, "__dict__"):
        return False
    return any(_holds_tensors(item, depth - 1) for item in vars(value).values())


def _with_dynamic(spec: Input, index: int, proved: Sequence[variants.Dimension]) -> Input:
    if spec.shape is None:
        return spec
    free = {place for dim in proved for place in dim.places}
    dynamic = tuple((index, dim) in free for dim in range(len(spec.shape)))
    return Input(spec.name, spec.path, spec.kind, spec.shape, spec.dtype, spec.value, dynamic)


def _recording(
    call: Call,
    leaves: list[Any],
    base: _Run,
    inputs: tuple[Input, ...],
    equal: tuple[tuple[tuple[int, int], ...], ...],
    settings: _Settings,
    notes: list[str],
    mode: Any,
) -> Recording:
    recorder = base.recorder
    graph = recorder.graph
    output: fx.Node = next(reversed(graph.nodes))  # type: ignore[call-overload]
    flat = list(output.args[0])  # type: ignore[arg-type]
    logs = []
    index = base.output_count
    for name, logged, options in base.logs:
        if isinstance(logged, nn.Module):
            logs.append(LogCall(name, None, logged, options))
            continue
        value = flat[index]
        constant = not isinstance(value, fx.Node)
        logs.append(LogCall(name, None if constant else index, value if constant else None, options))
        index += 1
    recording = Recording(
        graph=graph,
        root=call.root,
        inputs=inputs,
        loss_index=loss_index(base.output_tree, base.tensors[: base.output_count]),
        logs=tuple(logs),
        training=call.root.training,
        constants=dict(recorder.constants),
        input_tree=call.tree,
        output_tree=base.output_tree,
        step=call.step,
        equal_sizes=equal,
        leaves=tuple(sorted(settings.whole)),
        notes=(*recorder.notes, *notes),
    )
    annotate(recording, recorder)
    expected = base.tensors
    if base.leaves is not leaves:
        result, logged = _eager(call, leaves, mode)
        expected = [*trees.flatten(result)[0], *(v for _, v, _ in logged if not isinstance(v, nn.Module))]
    verify(recording, [_copy(leaf) for leaf in leaves], expected, mode)
    recorder.kept.clear()
    recorder.values.clear()
    return recording


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
