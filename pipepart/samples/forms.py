"""Forms: the value of an output for the whole batch as a tree of sums over samples and their denominators.

The form of a loss `ce(x, y) + 0.1 * (l * mask).sum() / mask.sum()`:

```
Op add ---- Ratio ce        numerator: ce with reduction="sum", denominator: targets of the batch that are not ignored
       \\--- Op mul 0.1 ---- Scaled div by mask.sum() of the whole batch ---- Sum of l * mask
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from pipepart.samples.quantities import SAMPLES, Quantity

__all__ = [
    "Denominator",
    "Form",
    "Keep",
    "Op",
    "Ratio",
    "Scaled",
    "Share",
    "Sum",
    "Whole",
    "denominators",
    "is_plain_sum",
    "law_of_output",
    "parts_of",
]

Denominator = tuple[tuple[str, int], ...]
"""Powers of quantities by their keys, sorted. A number that divides has a negative power."""


@dataclass(frozen=True, eq=False)
class Form:
    """The rule by which values of micro-batches make up the value of `node` for the whole batch."""

    node: Any
    """A node; of `Keep` also a plain number."""


class Keep(Form):
    """A value that does not depend on the batch."""


class Sum(Form):
    """A sum over samples: values of micro-batches add up."""


class Share(Form):
    """A mean over samples: each micro-batch is weighted by its share of samples."""


@dataclass(frozen=True, eq=False)
class Whole(Form):
    """A number that comes from the batch alone: the first stage computes it for the whole batch."""

    quantity: Quantity


@dataclass(frozen=True, eq=False)
class Ratio(Form):
    """A sum over samples, divided by a quantity that depends on the contents of the batch."""

    quantity: Quantity
    numerator: Callable[[fx.Graph], fx.Node]
    """Writes the op that computes the sum instead."""
    per_row: fx.Node | None = None
    """Selected rows, if the mean also goes over their other dimensions."""


@dataclass(frozen=True, eq=False)
class Scaled(Form):
    """A form, multiplied with or divided by a number that comes from the batch alone."""

    term: Form
    quantity: Quantity
    power: int
    """1 or -1."""


@dataclass(frozen=True, eq=False)
class Op(Form):
    """A linear op on forms; its other arguments do not depend on the batch."""

    arguments: Mapping[Any, Form]
    """Forms of arguments, by argument (a node or a plain number)."""


def _inner(form: Form) -> tuple[Form, ...]:
    """Return the forms from which a form is made; empty for a term."""
    if isinstance(form, Op):
        return tuple(form.arguments.values())
    return (form.term,) if isinstance(form, Scaled) else ()


def _powers(form: Form) -> Denominator:
    """Return the quantities by which a form itself, apart from those inside it, multiplies or divides."""
    if isinstance(form, (Ratio, Scaled)):
        return ((form.quantity.key, form.power if isinstance(form, Scaled) else -1),)
    return ((SAMPLES, -1),) if isinstance(form, Share) else ()


def parts_of(form: Form) -> Iterator[Form]:
    """Yield a form and all forms inside it."""
    yield form
    for inner in _inner(form):
        yield from parts_of(inner)


def _terms(form: Form, outside: Denominator = ()) -> Iterator[tuple[Form, Denominator]]:
    """Yield the terms of a form, each with its denominator."""
    powers = dict(outside)
    for key, power in _powers(form):
        powers[key] = powers.get(key, 0) + power
    denominator = tuple(sorted((key, power) for key, power in powers.items() if power))
    if not _inner(form):
        yield form, denominator
    for inner in _inner(form):
        yield from _terms(inner, denominator)


def denominators(form: Form) -> set[Denominator]:
    """Return the denominators of the terms that depend on parameters and on the batch."""
    return {denominator for term, denominator in _terms(form) if not isinstance(term, (Keep, Whole))}


def law_of_output(form: Form) -> str:
    """Return "constant", "mean" (weighted by samples, as it is) or "sum" (once weights are written into the graph)."""
    found = list(_terms(form))
    if all(isinstance(term, Keep) and not denominator for term, denominator in found):
        return "constant"
    if all(isinstance(term, (Keep, Share)) and denominator == _powers(term) for term, denominator in found):
        return "mean"
    return "sum"


def is_plain_sum(form: Form) -> bool:
    """Return whether values of micro-batches add up as they are."""
    return all(isinstance(term, Sum) and not denominator for term, denominator in _terms(form))
