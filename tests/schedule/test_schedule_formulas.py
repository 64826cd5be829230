"""The known step times and peaks of the schedules, met exactly with equal stages and free communication."""

from __future__ import annotations

import pytest

from pipepart.schedule import ChunkCosts, lower_bound, make_schedule, peak_activations, simulate, step_time, v_placement

QUICK = [(p, m) for p in (1, 2, 3, 4, 7, 12) for m in (1, 2, 3, 4, 5, 8, 13, 24)]
FULL = [pytest.param(p, id=f"p{p}", marks=pytest.mark.slow) for p in range(1, 17)]
RATIOS = [(1.0, 1.0, 1.0), (1.0, 1.5, 0.5), (2.0, 1.0, 3.0)]


def even(p, v=1, ratio=(1.0, 1.0, 1.0)):
    return ChunkCosts.even(p, v, forward=ratio[0], backward_input=ratio[1], backward_weight=ratio[2])


def made(name, p, m, v=1):
    return make_schedule(name, stages=p, microbatches=m, chunks=v)


def check_full_backward(p, m, ratio):
    one = sum(ratio)
    assert step_time(made("gpipe", p, m), even(p, 1, ratio)) == pytest.approx((m + p - 1) * one)
    assert step_time(made("1f1b", p, m), even(p, 1, ratio)) == pytest.approx((m + p - 1) * one)
    assert peak_activations(made("gpipe", p, m)) == (m,) * p
    assert peak_activations(made("1f1b", p, m)) == tuple(min(m, p - i) for i in range(p))
    for v in range(1, 5):
        schedule = made("interleaved", p, m, v)
        bubble = (p - 1) * one / v if m >= p else (p - m) * one + (m - 1) * one / v
        assert step_time(schedule, even(p, v, ratio)) == pytest.approx(m * one + bubble), (p, m, v)
        if m % p == 0 and m > p and v > 1:
            peaks = peak_activations(schedule, even(p, v).activation)
            assert peaks[0] == pytest.approx(p + (p - 1) / v)
            assert max(peaks) == peaks[0]


def check_zero_bubble(p, m):
    """F = I = W = 1. With fewer micro-batches than the formulas are for, the lower bound is met instead."""
    h1 = simulate(made("zb_h1", p, m), even(p))
    few = p + (p - 1) + 2 * m  # the first gradient must come back before stage 0 can go on
    assert h1.step_time == pytest.approx(max(3 * m + (p - 1), few))
    assert max(h1.peak_activations) == min(p, m)
    h2 = simulate(made("zb_h2", p, m), even(p))
    assert h2.period == pytest.approx(max(3 * m, few))
    assert max(h2.peak_activations) == min(2 * p - 1, m)
    zbv = simulate(made("zb_v", p, m, 2), even(p, 2))
    assert max(zbv.peak_activations) <= min(p, m)
    if m > p:
        assert zbv.step_time == pytest.approx(max(3 * m + (p - 1) / 2, 2 * m + 2 * p - 1))
    else:
        assert zbv.step_time == pytest.approx(lower_bound(v_placement(p), m, even(p, 2), split=True))
    if m >= 2 * p - 1:
        assert zbv.peak_activations == pytest.approx((p,) * p)
        assert zbv.step_time == pytest.approx(3 * m + (p - 1) / 2)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize(("p", "m"), QUICK)
def test_full_backward_schedules_meet_their_formulas(p, m, ratio):
    check_full_backward(p, m, ratio)


@pytest.mark.parametrize(("p", "m"), QUICK)
def test_zero_bubble_schedules_meet_their_formulas(p, m):
    check_zero_bubble(p, m)


def up_to_64(p):
    """All of them for few stages; for many, all around the multiples of the stages, where formulas change, and the ends."""
    if p <= 8:
        return range(1, 65)
    near = {k * p + d for k in (1, 2) for d in (-1, 0, 1)} | {3 * p, 3 * p + 2}
    return sorted(m for m in near | {1, 2, 3, 5, 64} if m <= 64)


@pytest.mark.parametrize("p", FULL)
def test_every_formula_up_to_64_microbatches(p):
    for m in up_to_64(p):
        check_full_backward(p, m, (1.0, 1.0, 1.0))
        check_zero_bubble(p, m)


@pytest.mark.parametrize("ratio", [(1.0, 2.0, 1.0), (1.0, 1.0, 0.5), (1.0, 1.2, 0.8), (1.0, 1.0, 0.9)])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 13), (8, 16)])
def test_zero_bubble_formulas_hold_for_other_ratios_where_w_is_the_shortest(p, m, ratio):
    f, i, w = ratio
    h1 = simulate(made("zb_h1", p, m), even(p, 1, ratio))
    assert h1.step_time == pytest.approx(m * sum(ratio) + (p - 1) * (f + i - w))
    h2 = simulate(made("zb_h2", p, 2 * m), even(p, 1, ratio))
    assert h2.period == pytest.approx(2 * m * sum(ratio) + (p - 1) * (f + i - 2 * w))


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "bubble"),
    [
        ("1f1b", 4, 8, 1, 0.2727),
        ("interleaved", 4, 8, 2, 0.1579),
        ("interleaved", 4, 8, 4, 0.0857),
        ("zb_v", 4, 8, 2, 0.0588),
        ("1f1b", 8, 24, 1, 0.2258),
        ("interleaved", 8, 24, 2, 0.1273),
        ("interleaved", 8, 24, 4, 0.068),
    ],
)
def test_published_bubble_fractions(name, p, m, v, bubble):
    assert simulate(made(name, p, m, v), even(p, v)).bubble == pytest.approx(bubble, abs=5e-5)


def test_zb_v_for_8_stages_is_as_short_as_any_synchronous_schedule():
    timeline = simulate(made("zb_v", 8, 24, 2), even(8, 2))
    assert timeline.step_time == 75.5 == 72 + 7 * 0.5
    assert lower_bound(v_placement(8), 24, even(8, 2), split=True) == 75.5


@pytest.mark.parametrize("v", [1, 2, 3])
def test_forward_only_is_a_full_pipeline(v):
    for p in (1, 2, 4):
        for m in (1, 3, 4, 8):
            schedule = made("forward", p, m, v)
            assert schedule.forward_only
            time = step_time(schedule, even(p, v))
            assert time == pytest.approx(m + (p - 1) / v if m >= p else p + (m - 1) / v)
            assert max(peak_activations(schedule)) == 1
