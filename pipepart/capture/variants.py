"""Other example sizes: what a recording must not bake in is found by recording more than once and comparing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from pipepart.capture.fingerprint import structure, target_name
from pipepart.capture.recorder import Recorder

__all__ = ["Dimension", "Mismatch", "compare", "dimensions", "resize"]


@dataclass(frozen=True)
class Dimension:
    """A size of the example that may change, and where it occurs: (leaf, dimension) pairs that change together."""

    size: int
    places: tuple[tuple[int, int], ...]
    is_batch: bool

    def candidates(self) -> list[int]:
        """Other sizes to try, the most telling and cheapest first. Never 1, which broadcasts."""
        n = self.size
        if self.is_batch:
            options = [n - 1, n // 2, 2 * n] if n > 2 else [n + 1, 2 * n]
        else:
            options = [(n + 1) // 2, 2 * n]
        return [option for option in dict.fromkeys(options) if option > 1 and option != n]


@dataclass(frozen=True)
class Mismatch:
    """The first place where two recordings of one model differ."""

    module: str
    text: str


def dimensions(leaves: Sequence[Any]) -> list[Dimension]:
    """The batch dimension (dim 0 of the first tensor, and of all leaves of that size), then the others by size."""
    shapes = {
        i: tuple(leaf.shape) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0
    }
    if not shapes:
        return []
    batch = next(iter(shapes.values()))[0]
    groups: dict[int, list[tuple[int, int]]] = {}
    first: list[tuple[int, int]] = []
    for i, shape in shapes.items():
        for dim, size in enumerate(shape):
            if dim == 0 and size == batch:
                first.append((i, dim))
            elif size > 1:
                groups.setdefault(size, []).append((i, dim))
    rest = [Dimension(size, tuple(places), False) for size, places in groups.items()]
    return [Dimension(batch, tuple(first), True), *rest]


def resize(leaves: Sequence[Any], dimension: Dimension, size: int) -> list[Any]:
    """The example at another size: rows are left out or repeated, so that the contents stay valid."""
    out = list(leaves)
    for i, dim in dimension.places:
        leaf = out[i]
        have = leaf.shape[dim]
        if size > have:
            leaf = torch.cat([leaf] * -(-size // have), dim)
        resized = leaf.narrow(dim, 0, size).detach().clone()
        out[i] = resized.requires_grad_() if leaf.requires_grad else resized
    return out


def compare(base: Recorder, other: Recorder) -> Mismatch | None:
    """None if both graphs do the same with the same constants (sizes that are nodes may differ)."""
    left, right = list(base.graph.nodes), list(other.graph.nodes)
    index_left = {node: i for i, node in enumerate(left)}
    index_right = {node: i for i, node in enumerate(right)}
    for a, b in zip(left, right):
        fact = base.facts.get(a)
        where = fact.module if fact else ""
        line = f"{a.name} in module {where!r} at {fact.source if fact else ''}"
        if a.op != b.op or target_name(a.target) != target_name(b.target):
            return Mismatch(where, f"{line}: another op is called ({target_name(a.target)} / {target_name(b.target)})")
        text_a = structure((a.args, dict(a.kwargs)), lambda node: f"%{index_left[node]}")
        text_b = structure((b.args, dict(b.kwargs)), lambda node: f"%{index_right[node]}")
        if text_a != text_b:
            return Mismatch(where, f"{line}: called with {_difference(text_a, text_b)}")
        if a.op == "get_attr" and a.target in base.constants:
            if not _same_constant(base.constants[str(a.target)], other.constants[str(b.target)]):
                return Mismatch(where, f"{line}: reads a tensor that was computed outside the recorded ops")
    if len(left) != len(right):
        return Mismatch("", f"{len(left)} and {len(right)} ops were recorded")
    return None


def _difference(a: str, b: str) -> str:
    start = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    low = max(0, start - 12)
    return f"...{a[low : start + 24]} / ...{b[low : start + 24]}"


def _same_constant(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b)
    if a is b:
        return True
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return hasattr(a, "fake_mode") or bool(torch.equal(a, b))


def input_sizes(base: Recorder) -> dict[fx.Node, tuple[int, ...]]:
    """Shapes of the tensor inputs of a run."""
    return {
        node: shape
        for node in base.graph.nodes
        if node.op == "placeholder" and (shape := base.facts[node].shape) is not None
    }
