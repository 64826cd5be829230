"""The window: all batches that are accumulated for one step of the optimizer, and their numbers together.

A loss whose terms are divided by different numbers (`mlm / tokens + nsp / pairs`) needs these numbers of the whole window
before its first backward. They come from the batches alone, so they are known as soon as the batches are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipepart.samples.quantities import SAMPLES, Totals

__all__ = ["BATCHES_OF_OTHER_FORMS", "NOT_KNOWN_AHEAD", "CountsAlike", "Window", "open_window"]

_ROUNDING = 1e-6

_ALIKE = "each batch is exact, and their gradients are averaged with equal weights, as on one device"
NOT_KNOWN_AHEAD = (
    "the loss has terms that are divided by different numbers of the batch, and the batches that are accumulated with it "
    f"are not known when the first of them is trained on: {_ALIKE}"
)
BATCHES_OF_OTHER_FORMS = (
    "the loss has terms that are divided by different numbers of the batch, and batches that are accumulated together need "
    f"different recordings of the step (another structure, type or Python state): {_ALIKE}"
)


class CountsAlike(UserWarning):
    """Accumulated batches are averaged with equal weights, where one process on all of them would weigh their terms."""


@dataclass(frozen=True)
class Window:
    """The numbers of all batches of a window, in all replicas."""

    batches: int
    sums: Mapping[str, float]
    """What adds up over batches, by the ops that it comes from."""
    samples: int
    expected: tuple[Mapping[str, float], ...]
    """The same for each batch of this replica."""

    def expects(self, position: int, counts: Mapping[str, float]) -> bool:
        """Whether the batch at `position` has the numbers that the sums were made with."""
        if position >= self.batches or not counts.keys() <= self.expected[position].keys():
            return False
        known = self.expected[position]
        return all(abs(known[key] - value) <= _ROUNDING * abs(value) for key, value in counts.items())


def open_window(counts: Sequence[Mapping[str, float] | None], totals: Totals | None) -> Window | None:
    """The window over batches with these counts; None if those of one are not known, here or in another replica.

    `totals` adds numbers over replicas; all of them must call it together.
    """
    known = [own for own in counts if own is not None]
    complete = len(known) == len(counts)
    keys = list(counts[0] or ())
    sums = [sum(own[key] for own in known) for key in keys]
    if totals is not None:
        *sums, missing = totals([*sums, float(not complete)])
        complete = not missing
    if not complete:
        return None
    together = dict(zip(keys, sums))
    return Window(len(counts), together, int(together.pop(SAMPLES)), tuple(known))
