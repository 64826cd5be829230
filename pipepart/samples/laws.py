"""Laws: how the value of an op for a whole batch follows from its values for the parts of that batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

__all__ = ["SHARED", "UNKNOWN", "Law", "concatenated_dim", "law_of", "merged"]

_EXACT = 1e-7
"""The difference that another order of summation may make in float64, relative to the largest element."""
_ROUNDED = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2, torch.complex64: 1e-3}
_WHOLE_NUMBERS = (torch.int64, torch.int32, torch.int16)


@dataclass(frozen=True)
class Law:
    """The way from the values of the parts to the value of the whole.

    - ``batched``: the concatenation along `dim`.
    - ``shared``: all are equal.
    - ``mean``: the mean, weighted by the number of samples.
    - ``sum``: the sum.
    - ``blocks``: several blocks of samples along `dim`, each of which is concatenated (two views, crops or time steps that
      were put together before the network).
    - ``rows``: the same rows along `dim` in another order.
    - ``numbered``: whole numbers, concatenated along `dim` after the samples of the parts before are added (the graph to
      which a node belongs).
    - ``shifted``: the same with any other number for each part (the nodes that an edge connects).
    - ``tuple``: several values, each with a law of its own.
    - ``unknown``: none of these.
    """

    kind: str
    dim: int = 0

    @property
    def known(self) -> bool:
        return self.kind != "unknown"

    @property
    def merges(self) -> bool:
        """Whether the whole can be made from the parts."""
        return self.kind in ("batched", "blocks", "shared", "mean", "sum", "numbered")


UNKNOWN, SHARED = Law("unknown"), Law("shared")


def law_of(whole: Any, parts: Sequence[Any], sizes: Sequence[int]) -> Law:
    """Return the law between a value of the whole batch and those of its parts, which have `sizes` samples."""
    if isinstance(whole, np.ndarray) and all(isinstance(part, np.ndarray) for part in parts):
        whole, parts = torch.as_tensor(whole), [torch.as_tensor(part) for part in parts]
    if isinstance(whole, torch.Tensor):
        if not all(isinstance(part, torch.Tensor) and part.dtype == whole.dtype for part in parts):
            return UNKNOWN
        try:
            with torch.no_grad():
                return _of_tensors(whole.detach(), [part.detach() for part in parts], sizes)
        except (RuntimeError, NotImplementedError):  # sparse and other layouts
            return UNKNOWN
    if isinstance(whole, (bool, str, type(None))):
        return SHARED if all(part == whole for part in parts) else UNKNOWN
    if isinstance(whole, (int, float)):
        return _of_numbers(whole, parts, sizes)
    if isinstance(whole, (tuple, list)) and all(
        type(part) is type(whole) and len(part) == len(whole) for part in parts
    ):
        laws = [law_of(item, [part[i] for part in parts], sizes) for i, item in enumerate(whole)]
        if all(law == SHARED for law in laws):
            return SHARED
        return Law("tuple") if all(law.known for law in laws) else UNKNOWN
    if isinstance(whole, dict) and all(isinstance(part, dict) and part.keys() == whole.keys() for part in parts):
        return law_of(list(whole.values()), [list(part.values()) for part in parts], sizes)
    try:
        return SHARED if all(part is whole or bool(part == whole) for part in parts) else UNKNOWN
    except Exception:
        return UNKNOWN


def merged(law: Law, parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return the value of the whole from those of the parts, which have `sizes` samples. Gradients flow back to the parts."""
    if law.kind == "batched":
        return torch.cat(list(parts), law.dim) if len(parts) > 1 else parts[0]
    if law.kind == "blocks":
        blocks = [part.unflatten(law.dim, (-1, size)) for part, size in zip(parts, sizes)]
        return torch.cat(blocks, law.dim + 1).flatten(law.dim, law.dim + 1)
    if law.kind == "numbered":
        starts = itertools.accumulate(sizes[:-1], initial=0)
        return torch.cat([part + start for part, start in zip(parts, starts)], law.dim)
    if law.kind == "mean":
        weights = [size / sum(sizes) for size in sizes]
        return sum((part * weight for part, weight in zip(parts[1:], weights[1:])), parts[0] * weights[0])
    if law.kind == "sum":
        return sum(parts[1:], parts[0])
    assert law.kind == "shared", law
    return parts[-1]


def concatenated_dim(whole: Any, parts: Sequence[Any]) -> int | None:
    """Return the dimension along which the parts have the shape of the whole if concatenated; None if there is none."""
    if any(part.ndim != whole.ndim for part in parts):
        return None
    for dim in range(whole.ndim):
        others = {(*tensor.shape[:dim], *tensor.shape[dim + 1 :]) for tensor in (whole, *parts)}
        if len(others) == 1 and sum(part.shape[dim] for part in parts) == whole.shape[dim]:
            return dim
    return None


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are equal up to the order of summation."""
    if a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    if a.numel() == 0:
        return True
    tolerance = _ROUNDED.get(a.dtype, _EXACT)
    magnitude = torch.where(torch.isfinite(a), a.abs(), 0.0)
    near = (a - b).abs() <= tolerance * magnitude.max().clamp(min=1e-30)
    return bool((near | (a == b) | (a.isnan() & b.isnan())).all())


def _of_tensors(whole: torch.Tensor, parts: list[torch.Tensor], sizes: Sequence[int]) -> Law:
    if all(part.shape == whole.shape for part in parts):
        if all(_same(whole, part) for part in parts):
            return SHARED
        if (whole.is_floating_point() or whole.is_complex()) and _same(whole, merged(Law("mean"), parts, sizes)):
            return Law("mean")
        if whole.dtype != torch.bool and _same(whole, merged(Law("sum"), parts, ())):
            return Law("sum")
        return UNKNOWN
    dim = concatenated_dim(whole, parts)
    if dim is None:
        return UNKNOWN
    together = torch.cat(parts, dim)
    if _same(whole, together):
        return Law("batched", dim)
    if whole.dtype in _WHOLE_NUMBERS and (kind := _numbering(whole, parts, sizes, dim)):
        return Law(kind, dim)
    if _in_blocks(parts, sizes, dim) and _same(whole, merged(Law("blocks", dim), parts, sizes)):
        return Law("blocks", dim)
    return Law("rows", dim) if _same_rows(whole, together, dim) else UNKNOWN


def _in_blocks(parts: list[torch.Tensor], sizes: Sequence[int], dim: int) -> bool:
    """Return whether each part has the same number of blocks of its samples, more than one."""
    counts = {divmod(part.shape[dim], size) for part, size in zip(parts, sizes)}
    return len(counts) == 1 and all(count > 1 and rest == 0 for count, rest in counts)


def _numbering(whole: torch.Tensor, parts: list[torch.Tensor], sizes: Sequence[int], dim: int) -> str:
    """Return the law if each part has the numbers of the whole up to one offset for the part; empty if not."""
    mine = whole.split([part.shape[dim] for part in parts], dim)
    apart = [(a - b).unique() for a, b in zip(mine, parts) if a.numel()]
    if any(len(numbers) != 1 for numbers in apart) or max(part.numel() for part in parts) < 2:
        return ""
    if torch.equal(whole, merged(Law("numbered", dim), parts, sizes)):
        return "numbered"
    return "shifted" if min(part.numel() for part in parts) > 1 else ""  # a single number always has an offset


def _same_rows(a: torch.Tensor, b: torch.Tensor, dim: int) -> bool:
    """Return whether two tensors have the same rows in some order, compared by one number for each row."""
    rows = [t.movedim(dim, 0).flatten(1) if t.dim() > 1 else t.unsqueeze(1) for t in (a, b)]
    if rows[0].is_complex():
        rows = [torch.view_as_real(row).flatten(1) for row in rows]
    generator = torch.Generator().manual_seed(0)
    mix = torch.rand(rows[0].shape[1], generator=generator, dtype=torch.float64).to(a.device)
    numbers = [(torch.nan_to_num(row.double(), 0.0, 1e30, -1e30) @ mix).sort().values for row in rows]
    wanted = numbers[0] if a.dtype in (torch.float64, torch.complex128) else numbers[0].to(torch.float32)
    return _same(wanted, numbers[1].to(wanted.dtype))


def _of_numbers(whole: float, parts: Sequence[Any], sizes: Sequence[int]) -> Law:
    if not all(isinstance(part, (int, float)) and not isinstance(part, bool) for part in parts):
        return UNKNOWN
    near = abs(whole) * _EXACT
    if all(abs(part - whole) <= near for part in parts):
        return SHARED
    if abs(sum(parts) - whole) <= near:
        return Law("sum")
    mean = sum(part * size for part, size in zip(parts, sizes)) / sum(sizes)
    return Law("mean") if isinstance(whole, float) and abs(mean - whole) <= near else UNKNOWN
