"""How the value of a node for the whole batch is made of its values for micro-batches: a small tree over recorded nodes.

The tree of a loss `ce(x, y) + 0.1 * (l * mask).sum() / mask.sum()`:

```
Op add ---- Ratio ce        numerator: ce with reduction="sum", denominator: targets of the batch that are not ignored
       \\--- Op mul 0.1 ---- Scaled div by mask.sum() of the whole batch ---- Sum of l * mask
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from pipepart.samples.quantities import SAMPLES, Quantity

__all__ = [
    "Form",
    "Keep",
    "Monomial",
    "Op",
    "Ratio",
    "Scaled",
    "Share",
    "Sum",
    "Whole",
    "is_plain_sum",
    "law_of",
    "monomials",
    "parts_of",
]

Monomial = tuple[tuple[str, int], ...]
"""What a term is divided by: powers of quantities of the batch, by their keys."""


@dataclass(frozen=True, eq=False)
class Keep:
    """Does not depend on the batch."""

    node: Any
    """A node, or a plain number."""


@dataclass(frozen=True, eq=False)
class Whole:
    """A number that comes from the batch alone: the first stage computes it for the whole batch."""

    node: fx.Node
    quantity: Quantity


@dataclass(frozen=True, eq=False)
class Sum:
    """A sum over samples: values of micro-batches add up."""

    node: fx.Node


@dataclass(frozen=True, eq=False)
class Share:
    """A mean over samples: each micro-batch counts by its share of samples."""

    node: fx.Node


@dataclass(frozen=True, eq=False)
class Ratio:
    """A sum over samples, divided by something that depends on the contents of the batch."""

    node: fx.Node
    quantity: Quantity
    numerator: Callable[[fx.Graph], fx.Node]
    """Writes the op that computes the sum instead."""
    per_row: Any = None
    """A node of selected rows: the mean also goes over the other dimensions of it."""


@dataclass(frozen=True, eq=False)
class Scaled:
    """A form, multiplied with or divided by a number that comes from the batch alone."""

    node: fx.Node
    inner: Form
    quantity: Quantity
    power: int
    """1 or -1."""


@dataclass(frozen=True, eq=False)
class Op:
    """A linear op on forms; its other arguments do not depend on the batch."""

    node: fx.Node
    inner: tuple[tuple[Any, Form], ...]
    """Arguments (nodes or plain numbers) and what they are."""


Form = Keep | Whole | Sum | Share | Ratio | Scaled | Op


def leaves(form: Form, power: Monomial = ()) -> Iterator[tuple[Form, Monomial]]:
    """The terms of a form with what each is divided by."""
    if isinstance(form, Op):
        for _, inner in form.inner:
            yield from leaves(inner, power)
    elif isinstance(form, Scaled):
        yield from leaves(form.inner, _times(power, form.quantity.key, form.power))
    elif isinstance(form, Ratio):
        yield form, _times(power, form.quantity.key, -1)
    elif isinstance(form, Share):
        yield form, _times(power, SAMPLES, -1)
    else:
        yield form, power


def _times(power: Monomial, key: str, by: int) -> Monomial:
    powers = dict(power)
    powers[key] = powers.get(key, 0) + by
    return tuple(sorted((name, value) for name, value in powers.items() if value))


def parts_of(form: Form) -> Iterator[Form]:
    """A form and all forms inside of it."""
    yield form
    if isinstance(form, Op):
        for _, inner in form.inner:
            yield from parts_of(inner)
    elif isinstance(form, Scaled):
        yield from parts_of(form.inner)


def monomials(form: Form) -> set[Monomial]:
    """What the terms that depend on parameters and on the batch are divided by, one entry for terms that share it."""
    return {power for leaf, power in leaves(form) if not isinstance(leaf, (Keep, Whole))}


def law_of(form: Form) -> str:
    """ "constant", "mean" (by the share of samples, as it is) or "sum" (once weights are written into the graph)."""
    found = list(leaves(form))
    if all(isinstance(leaf, Keep) and not power for leaf, power in found):
        return "constant"
    plain = (((SAMPLES, -1),), ())
    if all(isinstance(leaf, (Keep, Share)) and power == plain[isinstance(leaf, Keep)] for leaf, power in found):
        return "mean"
    return "sum"


def is_plain_sum(form: Form) -> bool:
    """Whether values of micro-batches add up as they are."""
    return all(isinstance(leaf, Sum) and not power for leaf, power in leaves(form))
