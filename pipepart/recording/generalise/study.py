"""Runs at other sizes of the example: they show which dimensions are free, and which constants follow them.

The source of a number such as ``float(len(x))`` or ``2.0 * x.shape[0]`` cannot be recorded. Two runs at different sizes
show that the constant changes. It is explained by a simple formula that holds for both, and for a third run.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.fx as fx

from pipepart.errors import CaptureError
from pipepart.recording.fallbacks import Retry, keep_whole, remember, suspect
from pipepart.recording.generalise import variants
from pipepart.recording.model_state import state
from pipepart.recording.recorded_run.failures import NotRecordable
from pipepart.recording.recorded_run.recorder import Recorder
from pipepart.recording.recorded_run.runs import Call, Run, RunFailed, Settings, run_once

__all__ = ["FORMULAS", "Explanation", "Study"]


@dataclass(frozen=True)
class Formula:
    """A family of functions of a size with one free constant."""

    solve: Callable[[Any, int], Any]
    apply: Callable[[Any, int], Any]
    emit: Callable[[fx.Graph, Any, fx.Node], fx.Node]


def _whole(a: Any, n: int) -> Any:
    if isinstance(a, int):
        return a // n if a % n == 0 else None
    return a / n


FORMULAS: dict[str, Formula] = {
    "k * n": Formula(_whole, lambda k, n: k * n, lambda g, k, n: g.call_function(operator.mul, (k, n))),
    "n + k": Formula(lambda a, n: a - n, lambda k, n: n + k, lambda g, k, n: g.call_function(operator.add, (n, k))),
    "k / n": Formula(
        lambda a, n: a * n if isinstance(a, float) else None,
        lambda k, n: k / n,
        lambda g, k, n: g.call_function(operator.truediv, (k, n)),
    ),
    "k * sqrt(n)": Formula(
        lambda a, n: a / math.sqrt(n) if isinstance(a, float) else None,
        lambda k, n: k * math.sqrt(n),
        lambda g, k, n: g.call_function(operator.mul, (k, g.call_function(math.sqrt, (n,)))),
    ),
    "k / sqrt(n)": Formula(
        lambda a, n: a * math.sqrt(n) if isinstance(a, float) else None,
        lambda k, n: k / math.sqrt(n),
        lambda g, k, n: g.call_function(operator.truediv, (k, g.call_function(math.sqrt, (n,)))),
    ),
}


@dataclass(frozen=True)
class Explanation:
    """A constant that is a function of the size of one dimension."""

    formula: str
    constant: Any
    dimension: variants.Dimension

    def value(self, size: int) -> Any:
        """Return the value of the constant at this size."""
        return FORMULAS[self.formula].apply(self.constant, size)

    def holds(self, size: int, value: Any) -> bool:
        """Return whether `value` is the value of the formula at this size."""
        expected = self.value(size)
        return type(expected) is type(value) and math.isclose(expected, value, rel_tol=1e-9)


def _explanations(dimension: variants.Dimension, value: Any, size: int, other: Any) -> list[Explanation]:
    """Return the formulas by which a constant is `value` in the example and `other` at `size`, the simplest first."""
    found = []
    for name, formula in FORMULAS.items():
        constant = formula.solve(value, dimension.size)
        if constant is None:
            continue
        explanation = Explanation(name, constant, dimension)
        if explanation.holds(dimension.size, value) and explanation.holds(size, other):
            found.append(explanation)
    return found


Sizes = Mapping[tuple[tuple[int, int], ...], tuple[int | None, str]]
"""For (input, dimension) pairs that change together: another size with the same graph, or None and the reason."""


@dataclass
class Study:
    """Records a call at other sizes than those of the example, to find free dimensions and constants that follow them.

    `known` holds the results for the same call in the other mode (train or eval).
    """

    call: Call
    leaves: list[Any]
    base: Run
    names: state.Names
    settings: Settings
    mode: Any
    known: Sizes
    runs: list[Run] = field(default_factory=list)
    """Runs with the same graph, beginning with `base`."""
    proved: list[variants.Dimension] = field(default_factory=list)
    explained: dict[tuple[int, int], Explanation] = field(default_factory=dict)
    reasons: dict[variants.Dimension, str] = field(default_factory=dict)
    sizes: dict[tuple[tuple[int, int], ...], tuple[int | None, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.runs.append(self.base)

    def vary(self, dim: variants.Dimension) -> bool:
        """Record at another size of `dim`; returns True if the graph is the same.

        Results of the other mode are used: a size with the same graph is tried first; a dimension without one is fixed.
        """
        right, reason = self.known.get(dim.places, (0, ""))
        if right is None and not dim.is_batch:
            self.reasons[dim], self.sizes[dim.places] = reason, (None, reason)
            return False
        elements = sum(leaf.numel() for leaf in self.leaves if isinstance(leaf, torch.Tensor))
        for size in sorted(dim.candidates(elements), key=lambda size: size != right):
            try:
                run = self._run(dim, size)
            except RunFailed as error:
                remember(error.error, self.settings)
                if dim.is_batch and isinstance(error.error, NotRecordable):
                    for path in reversed(error.modules):
                        if keep_whole(self.call.root, path, self.settings, str(error)):
                            raise Retry from None
                reason = f"fails at size {size} ({str(error)[:160]})"
                continue
            mismatch, numbers = self._compare(run)
            if mismatch is None and numbers:
                mismatch = self._explain(dim, size, numbers)
            if mismatch is None:
                self.runs.append(run)
                self.proved.append(dim)
                self.sizes[dim.places] = size, ""
                return True
            reason = f"differs between sizes {dim.size} and {size}: {mismatch.text}"
            if mismatch.constant and not self.settings.warm:  # the first run may have set something up
                self.settings.warm = True
                raise Retry
            if dim.is_batch:
                suspect(self.names, self.settings)
                self._baked_in(mismatch.module, reason)
        self.reasons[dim], self.sizes[dim.places] = reason, (None, reason)
        return False

    def examples(self, others: Sequence[list[Any]]) -> None:
        """Record on other batches. A dimension that has another size there is free if the graph is the same.

        This is for batches that are split as containers: rows of their leaves cannot be left out, since other leaves
        refer to them.
        """
        for other in others:
            places = [
                (i, dim)
                for i, (mine, its) in enumerate(zip(self.leaves, other))
                if isinstance(mine, torch.Tensor)
                for dim in range(mine.dim())
                if mine.shape[dim] != its.shape[dim]
            ]
            groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
            for i, dim in places:
                groups.setdefault((self.leaves[i].shape[dim], other[i].shape[dim]), []).append((i, dim))
            dims = [variants.Dimension(size, tuple(group), False) for (size, _), group in groups.items()]
            try:
                run = run_once(self.call, other, self.names, self.settings, self.mode)
            except RunFailed as error:
                reason = f"fails on another batch ({str(error)[:160]})"
            else:
                mismatch, numbers = self._compare(run)
                if mismatch is None and not numbers:
                    self.runs.append(run)
                    self.proved += dims
                    continue
                reason = f"differs between two batches: {mismatch.text if mismatch is not None else numbers[0].text}"
            self.reasons.update(dict.fromkeys(dims, reason))

    def ignored_strings(self) -> set[int]:
        """Return the inputs that are texts (names of samples) without influence.

        Other texts, and one text more, give the same graph, and the same constants in results and in what the caller notes.
        """
        texts = {i for i, leaf in enumerate(self.leaves) if _is_text(leaf)}
        if self.call.step is None:  # an argument may be the name of a mode; texts in a container belong to its samples
            pieces = self.call.batching is not None and self.call.batching.in_pieces
            texts = {i for i in texts if pieces and type(self.leaves[i]) is list}
        if not texts:
            return set()
        for other, may_fail in ((_other_text, False), (_one_more, True)):
            changed = [other(leaf) if i in texts else leaf for i, leaf in enumerate(self.leaves)]
            try:
                run = run_once(self.call, changed, self.names, self.settings, self.mode)
            except RunFailed:
                if may_fail:  # a model may ask for one text for each sample
                    continue
                return set()
            mismatch, numbers = self._compare(run)
            if mismatch is not None or numbers or _constants(self.base) != _constants(run):
                return set()
        return texts

    def notes(self) -> list[str]:
        """Return notes on dimensions that are fixed, with the reasons."""
        free = {place for dim in self.proved for place in dim.places}
        return [
            f"{'batch size' if dim.is_batch else f'dimension of size {dim.size}'}: fixed; the model {reason}"
            for dim, reason in self.reasons.items()
            if not set(dim.places) <= free
        ]

    def _run(self, dim: variants.Dimension, size: int) -> Run:
        changed = variants.resize(self.leaves, dim, size)
        with warnings.catch_warnings():  # the user did not ask for these sizes
            warnings.simplefilter("ignore")
            return run_once(self.call, changed, self.names, self.settings, self.mode)

    def _compare(self, run: Run) -> tuple[variants.Mismatch | None, list[variants.Difference]]:
        known: variants.Known = {key: partial(_follows, item) for key, item in self.explained.items()}
        mismatch, numbers = variants.compare(self.base.recorder, run.recorder, known)
        if mismatch is None and _structures_differ(self.base, run):
            mismatch = variants.Mismatch("", "the results or the logged values have another structure")
        return mismatch, numbers

    def _explain(
        self, dim: variants.Dimension, size: int, numbers: list[variants.Difference]
    ) -> variants.Mismatch | None:
        """Find formulas for the numbers that changed with `dim`, and test them at a third size."""
        first = numbers[0]
        failure = variants.Mismatch(first.module, first.text)
        formulas = {(n.node, n.position): _explanations(dim, n.value, size, n.other) for n in numbers}
        third = next(
            (s for s in (*dim.candidates(), dim.size + 2, 2 * dim.size + 1) if s not in (dim.size, size)), None
        )
        if third is None or not all(formulas.values()):
            return failure
        try:
            run = self._run(dim, third)
        except RunFailed:
            return failure
        mismatch, seen = variants.compare(self.base.recorder, run.recorder, {})
        if mismatch is not None:
            return mismatch
        values = {(n.node, n.position): n.other for n in seen}
        for key, options in formulas.items():
            holding = [item for item in options if key in values and item.holds(third, values[key])]
            if not holding:
                return failure
            self.explained[key] = holding[0]
        return None

    def _baked_in(self, module: str, reason: str) -> None:
        if keep_whole(self.call.root, module, self.settings, reason):
            raise Retry
        raise CaptureError(
            f"{self.call.what} depends on the batch size in a way that cannot be recorded.\n  because: the model {reason}\n"
            f"  do: {_REMEDIES.get(_kind_of(reason), _REMEDY)}"
        )


_REMEDY = (
    "compute sizes from tensors (x.shape[0], not Python copies of it) or put this part into a submodule of its own, which is "
    "then kept whole. If the number is a count of calls (a counter, an iterator), let a hook such as on_train_batch_start "
    "change it, and only read it in the step"
)
_REMEDIES = {
    "list": "keep, return or log the tensor itself, and make a list or an array of it in a hook that sees the whole batch "
    "(on_validation_batch_end, on_predict_batch_end, a prediction writer)",
}


def _kind_of(reason: str) -> str:
    """The kind of a call by its place: one that makes a list or an array of a tensor has one item for each sample."""
    return "list" if any(f"Tensor.{name} in module" in reason for name in ("tolist", "numpy", "__array__")) else ""


def _follows(explanation: Explanation, recorder: Recorder, value: Any) -> bool:
    return explanation.holds(variants.size_in(recorder, explanation.dimension), value)


def _is_text(leaf: Any) -> bool:
    return isinstance(leaf, str) or (type(leaf) in (list, tuple) and all(type(item) is str for item in leaf))


def _other_text(leaf: Any) -> Any:
    return f"{leaf}~" if isinstance(leaf, str) else type(leaf)(f"{item}~" for item in leaf)


def _one_more(leaf: Any) -> Any:
    return leaf if isinstance(leaf, str) else type(leaf)([*leaf, "~"])


def _constants(run: Run) -> list[str]:
    """Return the texts and numbers among the results of a run and in what the caller notes about its extra outputs."""
    output: fx.Node = next(reversed(run.recorder.graph.nodes))
    found: list[str] = []
    _collect([output.args[0], *(dict(extra.about) for extra in run.extras)], found)
    return found


def _collect(value: Any, found: list[str]) -> None:
    if isinstance(value, (str, bool, int, float)):
        found.append(repr(value))
    elif isinstance(value, Mapping):
        for item in value.values():
            _collect(item, found)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for one in dataclasses.fields(value):
            _collect(getattr(value, one.name), found)


def _structures_differ(a: Run, b: Run) -> bool:
    """Return whether the results or the extra outputs of two runs have different structures."""
    return a.output_tree != b.output_tree or [e.name for e in a.extras] != [e.name for e in b.extras]
