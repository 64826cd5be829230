"""Batches whose gradients are added for one step of the optimizer: each counts by what its loss is divided by.

One process on all of these batches at once divides by the sum of what each is divided by (tokens, samples). That sum is
not known while the first batch runs, so gradients that wait are scaled when the next batch comes.
"""

from __future__ import annotations

__all__ = ["Accumulation"]

_ROUNDING = 1e-12


class Accumulation:
    """The batches of one optimizer step so far."""

    def __init__(self) -> None:
        self._count = 0
        self._total = 0.0
        self._equal = False

    def add(self, denominator: float | None, continues: bool, batches: int | None = None) -> tuple[float, float]:
        """By how much the gradients that wait are scaled, and those of the next batch.

        After k batches with denominators D, batch i has the weight ``k D_i / sum(D)``: 1 if all are equal. None: there
        is no one number that the loss is divided by, and all batches of this step count alike; or the loss is divided by
        the numbers of all `batches` of this step already, and counts that many times.
        """
        if not continues:
            self._count, self._total, self._equal = 0, 0.0, False
        if batches is not None:
            self._equal = True
            return 1.0, float(batches)
        count, total = self._count, self._total
        self._count += 1
        self._equal = self._equal or denominator is None
        if self._equal or denominator is None:
            return 1.0, 1.0
        self._total = total + denominator
        if not count or not self._total:
            return 1.0, 1.0
        kept = self._count / count * total / self._total if total else 1.0  # what waits is zero without targets
        return _whole(kept), _whole(self._count * denominator / self._total)


def _whole(factor: float) -> float:
    return 1.0 if abs(factor - 1.0) < _ROUNDING else factor
