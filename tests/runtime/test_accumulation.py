"""Accumulated batches count by what their losses are divided by."""

from __future__ import annotations

import pytest

from pipepart.runtime.gradients import Accumulation


@pytest.mark.parametrize(
    "denominators", [(3.0,), (4.0, 4.0, 4.0), (5.0, 1.0, 12.0), (0.0, 2.0), (0.0, 0.0, 7.0, 1.0), (2.0, 0.0)]
)
def test_each_batch_counts_by_its_denominator(denominators: tuple[float, ...]) -> None:
    weights: list[float] = []
    accumulation = Accumulation()
    for index, denominator in enumerate(denominators):
        kept, new = accumulation.add(denominator, continues=index > 0)
        weights = [weight * kept for weight in weights] + [new]
    total = sum(denominators)
    for weight, denominator in zip(weights, denominators):
        if denominator:  # a batch without targets has no gradient to weigh
            assert weight == pytest.approx(len(denominators) * denominator / total)


def test_batches_without_a_common_denominator_count_alike() -> None:
    accumulation = Accumulation()
    assert accumulation.add(3.0, continues=False) == (1.0, 1.0)
    assert accumulation.add(None, continues=True) == (1.0, 1.0)
    assert accumulation.add(9.0, continues=True) == (1.0, 1.0)
    assert accumulation.add(9.0, continues=False) == (1.0, 1.0)
