"""The example at other sizes: which dimensions are free, and which constants follow them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from pipepart.errors import CaptureError
from pipepart.recording.generalise import variants
from pipepart.recording.generalise.explanations import Explanation, explain
from pipepart.recording.model_state import state
from pipepart.recording.trace.failures import NotRecordable
from pipepart.recording.trace.recorder import Recorder
from pipepart.recording.trace.runs import Call, Retry, Run, RunFailed, Settings, keep_whole, remember, run_once, suspect

__all__ = ["Study"]


Sizes = Mapping[tuple[tuple[int, int], ...], tuple[int | None, str]]
"""For (input, dimension) pairs that change together: another size with the same graph, or None and why."""


class Study:
    """The example at other sizes: which dimensions are free, and which constants follow them."""

    def __init__(
        self,
        call: Call,
        leaves: list[Any],
        base: Run,
        names: state.Names,
        settings: Settings,
        mode: Any,
        known: Sizes,
    ):
        self.call, self.leaves, self.base = call, leaves, base
        self.names, self.settings, self.mode = names, settings, mode
        self.runs = [base]
        self.proved: list[variants.Dimension] = []
        self.explained: dict[tuple[int, int], Explanation] = {}
        self.reasons: dict[variants.Dimension, str] = {}
        self.known = known
        self.sizes: dict[tuple[tuple[int, int], ...], tuple[int | None, str]] = {}

    def vary(self, dim: variants.Dimension) -> bool:
        """Record at another size of `dim`; True if the graph is the same there.

        What the other mode has found is used: a size that was right is tried first, a dimension with none is fixed.
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
            reason = f"at sizes {dim.size} and {size}: {mismatch.text}"
            if mismatch.constant and not self.settings.warm:  # perhaps the first run has set something up
                self.settings.warm = True
                raise Retry
            if dim.is_batch:
                suspect(self.names, self.settings)
                self._baked_in(mismatch.module, reason)
        self.reasons[dim], self.sizes[dim.places] = reason, (None, reason)
        return False

    def examples(self, others: Sequence[list[Any]]) -> None:
        """Record on other batches; what has another size there, and gives the same graph, is free.

        For batches in pieces: rows of their leaves cannot be left out, since other leaves refer to them.
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
                reason = f"on two batches: {mismatch.text if mismatch is not None else numbers[0].text}"
            self.reasons.update(dict.fromkeys(dims, reason))

    def ignored_strings(self) -> set[int]:
        """Inputs that are text (names of samples) and have no influence: another text gives the same graph."""
        texts = {i for i, leaf in enumerate(self.leaves) if _is_text(leaf)}
        if self.call.step is None:  # an argument may be the name of a mode; the texts of a container are of its samples
            pieces = self.call.batching is not None and self.call.batching.in_pieces
            texts = {i for i in texts if pieces and type(self.leaves[i]) is list}
        if not texts:
            return set()
        changed = [_other_text(leaf) if i in texts else leaf for i, leaf in enumerate(self.leaves)]
        try:
            run = run_once(self.call, changed, self.names, self.settings, self.mode)
        except RunFailed:
            return set()
        mismatch, numbers = self._compare(run)
        return set() if mismatch is not None or numbers else texts

    def notes(self) -> list[str]:
        """What is fixed and why."""
        free = {place for dim in self.proved for place in dim.places}
        return [
            f"{'batch size' if dim.is_batch else f'dimension of size {dim.size}'}: fixed; the model {reason}"
            for dim, reason in self.reasons.items()
            if not set(dim.places) <= free
        ]

    def _run(self, dim: variants.Dimension, size: int) -> Run:
        changed = variants.resize(self.leaves, dim, size)
        with warnings.catch_warnings():  # what the model says of sizes that nobody asked for
            warnings.simplefilter("ignore")
            return run_once(self.call, changed, self.names, self.settings, self.mode)

    def _compare(self, run: Run) -> tuple[variants.Mismatch | None, list[variants.Difference]]:
        known: variants.Known = {key: partial(_follows, law) for key, law in self.explained.items()}
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
        except RunFailed:
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
        if keep_whole(self.call.root, module, self.settings, reason):
            raise Retry
        raise CaptureError(
            f"{self.call.what} depends on the batch size in a way that cannot be recorded.\n  {reason}\n"
            "  do: compute sizes from tensors (x.shape[0], not Python copies of it) or put this part into a "
            "submodule of its own, which is then kept whole"
        )


def _follows(law: Explanation, recorder: Recorder, value: Any) -> bool:
    return law.holds(variants.size_in(recorder, law.dimension), value)


def _is_text(leaf: Any) -> bool:
    return isinstance(leaf, str) or (type(leaf) in (list, tuple) and all(type(item) is str for item in leaf))


def _other_text(leaf: Any) -> Any:
    return f"{leaf}~" if isinstance(leaf, str) else type(leaf)(f"{item}~" for item in leaf)


def trees_differ(a: Run, b: Run) -> bool:
    """Whether two runs returned results of different structure, or different extra outputs."""
    return a.output_tree != b.output_tree or [e.name for e in a.extras] != [e.name for e in b.extras]
