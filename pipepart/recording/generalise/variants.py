"""Sizes of the example that may change, and the comparison of recorded runs at different sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from pipepart.recording.fingerprint import structure, target_name
from pipepart.recording.recorded_run.recorder import Recorder

__all__ = ["Difference", "Dimension", "Known", "Mismatch", "compare", "dimensions", "resize", "size_in", "together"]


_LARGE = 100_000
"""Number of elements from which an example is not recorded at larger sizes."""


@dataclass(frozen=True)
class Dimension:
    """A size of the example that may change, and its places: (leaf, dimension) pairs that change together."""

    size: int
    places: tuple[tuple[int, int], ...]
    is_batch: bool

    def candidates(self, elements: int = 0) -> list[int]:
        """Return other sizes to try, the most informative and cheapest first; never 1, which broadcasts.

        In a large example (many `elements`), dimensions other than the batch are not made larger.
        """
        n = self.size
        if self.is_batch:
            options = [n - 1, n // 2, 2 * n] if n > 2 else [n + 1, 2 * n]
        else:
            options = [(n + 1) // 2] + ([2 * n] if elements < _LARGE else [])
        return [option for option in dict.fromkeys(options) if option > 1 and option != n]


@dataclass(frozen=True)
class Mismatch:
    """The first place where two recordings of one model differ."""

    module: str
    text: str
    constant: bool = False
    """Whether one recording reads a tensor that the other computes."""


@dataclass(frozen=True)
class Difference:
    """A number among the arguments of a node that differs between two recordings."""

    node: int
    position: int
    value: Any
    other: Any
    module: str
    text: str


Known = dict[tuple[int, int], Callable[[Recorder, Any], bool]]
"""Numbers that follow a size, by node and position; the function tells whether the number of a run is right."""


def dimensions(leaves: Sequence[Any], batched: Collection[int] | None = None) -> list[Dimension]:
    """Return the batch dimension first, then the other dimensions of the example.

    The batch dimension is dimension 0 of the leaves `batched`, by default of those with the most frequent size. Other
    dimensions of one size and position (the lengths of ids and labels) change together.
    """
    shapes = {
        i: tuple(leaf.shape) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0
    }
    if not shapes:
        return []
    if batched is None:
        batch = Counter(shape[0] for shape in shapes.values()).most_common(1)[0][0]
        batched = [i for i, shape in shapes.items() if shape[0] == batch]
    else:
        batch = shapes[next(iter(batched))][0]
    groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
    first: list[tuple[int, int]] = []
    for i, shape in shapes.items():
        for dim, size in enumerate(shape):
            if dim == 0 and i in batched:
                first.append((i, dim))
            elif size > 1:
                groups.setdefault((size, dim), []).append((i, dim))
    rest = [Dimension(size, tuple(places), False) for (size, _), places in groups.items()]
    return [Dimension(batch, tuple(first), True), *rest]


def together(dims: Sequence[Dimension]) -> list[Dimension]:
    """Join dimensions of one size, for models that need equal sizes (square images, masks of length by length)."""
    groups: dict[int, list[Dimension]] = {}
    for dim in dims:
        groups.setdefault(dim.size, []).append(dim)
    return [
        Dimension(size, tuple(place for dim in group for place in dim.places), False)
        for size, group in groups.items()
        if len(group) > 1
    ]


def resize(leaves: Sequence[Any], dimension: Dimension, size: int) -> list[Any]:
    """Return the example at another size. Rows are left out or repeated, so that the contents stay valid."""
    out = list(leaves)
    for i, dim in dimension.places:
        leaf = out[i]
        have = leaf.shape[dim]
        if size > have:
            leaf = torch.cat([leaf] * -(-size // have), dim)
        resized = leaf.narrow(dim, 0, size).detach().clone()
        out[i] = resized.requires_grad_() if leaf.requires_grad else resized
    return out


def compare(base: Recorder, other: Recorder, known: Known) -> tuple[Mismatch | None, list[Difference]]:
    """Return the first difference of two recordings that cannot be explained, and the numbers that differ before it.

    Sizes that are nodes may differ; `known` holds the numbers that are known to follow a size.
    """
    left, right = list(base.graph.nodes), list(other.graph.nodes)
    index_left = {node: i for i, node in enumerate(left)}
    index_right = {node: i for i, node in enumerate(right)}
    numbers: list[Difference] = []
    for i, (a, b) in enumerate(zip(left, right)):
        fact = base.facts.get(a)
        where = fact.module if fact else ""
        line = f"{a.name} in module {where!r} at {fact.source if fact else ''}"
        if a.op != b.op or target_name(a.target) != target_name(b.target):
            text = f"{line}: another op is called ({target_name(a.target)} / {target_name(b.target)})"
            return Mismatch(where, text, _reads(base, a) != _reads(other, b)), numbers
        leaves_a, leaves_b = _leaves_of(a), _leaves_of(b)
        if len(leaves_a) != len(leaves_b):
            return Mismatch(where, f"{line}: called with other arguments ({a.args} / {b.args})"), numbers
        for position, (x, y) in enumerate(zip(leaves_a, leaves_b)):
            text_x = structure(x, lambda node: f"%{index_left[node]}")
            text_y = structure(y, lambda node: f"%{index_right[node]}")
            if text_x == text_y or (x != x and y != y):
                continue
            follows = known.get((i, position))
            if follows is not None and follows(other, y):
                continue
            text = f"{line}: called with {text_x} / {text_y}"
            if type(x) is type(y) and type(x) in (int, float):
                numbers.append(Difference(i, position, x, y, where, text))
            else:
                return Mismatch(where, text), numbers
        if _reads(base, a) and not _same_constant(base.constants[str(a.target)], other.constants[str(b.target)]):
            return Mismatch(where, f"{line}: reads a tensor that was computed outside the recorded ops"), numbers
    if len(left) != len(right):
        return Mismatch("", f"{len(left)} and {len(right)} ops were recorded"), numbers
    return None, numbers


def _reads(run: Recorder, node: fx.Node) -> bool:
    return node.op == "get_attr" and str(node.target) in run.constants


def _leaves_of(node: fx.Node) -> list[Any]:
    """Return the arguments of a node without their containers, always in the same order."""
    found: list[Any] = []
    fx.node.map_aggregate((node.args, dict(node.kwargs)), lambda leaf: found.append(leaf))
    return found


def _same_constant(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b)
    if a is b:
        return True
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return hasattr(a, "fake_mode") or bool(torch.equal(a, b))


def size_in(run: Recorder, dimension: Dimension) -> int:
    """Return the size of a dimension in a run."""
    leaf, dim = dimension.places[0]
    shape = run.facts[run.graph.find_nodes(op="placeholder")[leaf]].shape
    assert shape is not None
    return shape[dim]
