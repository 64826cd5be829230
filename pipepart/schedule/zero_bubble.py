"""Schedules that split the backward into ``I`` (input gradient, which others wait for) and ``W`` (weight gradient).

``W`` can be done at any later time, so it fills what would be bubble (Qi et al. 2023). In the pictures (by `gantt`)
digits are forwards of micro-batches 0, 1, ..., capital letters A, B, ... their ``I`` and small letters their ``W``.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipepart.schedule.actions import Action, Schedule, looped_placement, v_placement
from pipepart.schedule.chunk_times import ChunkCosts
from pipepart.schedule.greedy import Policy, list_schedule

__all__ = ["zb_h1", "zb_h2", "zb_v"]


def _delayed_weights(name: str, stages: int, microbatches: int, depth: int) -> Schedule:
    """1F1B order with ``W`` held back: stage i lets in ``depth (p-1-i) + 1`` micro-batches, ``W`` lags by ``depth i``.

    What later stages save by fewer micro-batches in flight they spend on held back weights: the peak is the same on
    all stages, and the gradients travel upstream without waiting for any ``W``.
    """

    def actions(stage: int) -> Iterator[Action]:
        ahead = min(microbatches, depth * (stages - 1 - stage) + 1)
        lag = depth * stage
        yield from (Action("F", stage, k) for k in range(ahead))
        for k in range(microbatches):
            yield Action("I", stage, k)
            if k >= lag:
                yield Action("W", stage, k - lag)
            if k + ahead < microbatches:
                yield Action("F", stage, k + ahead)
        yield from (Action("W", stage, k) for k in range(max(0, microbatches - lag), microbatches))

    placement = looped_placement(stages, 1)
    return Schedule(name, stages, microbatches, placement, tuple(tuple(actions(s)) for s in range(stages)))


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """Zero bubble with the memory of 1F1B's first stage: bubble ``(p-1)(F+I-W)``, p activations on every stage.

    ::

        stage  0  0123...Aa4Bb5CcDdEeFf
        stage  1  .012..A3Ba4Cb5DcEdFef
        stage  2  ..01.A2B3Ca4Db5EcFdef
        stage  3  ...0A1B2C3Da4Eb5Fcdef
    """
    return _delayed_weights("zb_h1", stages, microbatches, 1)


def zb_h2(stages: int, microbatches: int) -> Schedule:
    """Zero bubble with twice the memory: bubble ``(p-1)(F+I-2W)``, 2p-1 activations on every stage.

    That is the bubble of steps in a row: a stage goes on to its next step while later stages finish this one. With
    a barrier after each step the last stage's late start remains, as everywhere.

    ::

        stage  0  01234Aa5BbCcDdEeFf..
        stage  1  .012A3B4Ca5DbEcFdef.
        stage  2  ..0A1B2C3D4Ea5Fbcdef
    """
    return _delayed_weights("zb_h2", stages, microbatches, 2)


def zb_v(stages: int, microbatches: int) -> Schedule:
    """Two chunks per stage placed down and up again (Qi et al. 2023, section 6): no bubble when F = I = W.

    The first stage holds the first and the last chunk, so backwards start as soon as the first micro-batch is round,
    and p activations per stage are enough to be busy from a stage's first forward to the end::

        stage  0 chunk  0  01234.........Aa...Bb...CcDdEe..
        stage  0 chunk  5  .....0Aa1Bb2Cc..3Dd..4Ee........
        stage  1 chunk  1  .012.3......4Aa...Bb...C.DcEd.e.
        stage  1 chunk  4  ....0.1Aa2Bb...3Cc..4Dd.E....e..
        stage  2 chunk  2  ..0.1.2...3Aa...4Bb...C.D.Ec..de
        stage  2 chunk  3  ...0.1.2Aa...3Bb...4Cc.D.E..de..

    The order is a fixed pattern, with no hole from about 1.5 p micro-batches on. For p micro-batches and fewer memory
    is no limit, and plain list scheduling (backwards first, later chunk first) is as short as can be.
    """
    if microbatches > stages:
        return _zb_v_pattern(stages, microbatches)
    even = ChunkCosts.even(stages, 2)
    return list_schedule(v_placement(stages), microbatches, even, policy=Policy(patience=0.0), name="zb_v")


def _zb_v_pattern(stages: int, microbatches: int) -> Schedule:
    """The fixed order: per stage a warm-up, a steady state ``F0 I0 W0 F1 I1 W1``, and a cool-down."""
    last = 2 * stages - 1

    def actions(stage: int) -> Iterator[Action]:
        full = max(microbatches, 2 * stages - 1)
        chunk = {"0": stage, "1": last - stage}
        count = dict.fromkeys(("F0", "F1", "I0", "I1", "W0", "W1"), 0)

        def take(*names: str) -> Iterator[Action]:
            for name in names:
                k = count[name]
                if k < microbatches:
                    yield Action(name[0], chunk[name[1]], k)
                count[name] = k + 1

        for _ in range(2 * (stages - stage) - 1):
            yield from take("F0")
        for _ in range(stage):
            yield from take("F1", "F0")
        for _ in range(stages - stage):
            yield from take("F1", "I1", "W1")
        while count["F1"] < full:
            yield from take("F0", "I0", "W0", "F1", "I1", "W1")
        for _ in range(stage):
            yield from take("I0", "I1")
        for _ in range(stages - stage):
            yield from take("I0", "W0")
        for name in ("W1", "W0"):
            while count[name] < full:
                yield from take(name)

    placement = v_placement(stages)
    return Schedule("zb_v", stages, microbatches, placement, tuple(tuple(actions(s)) for s in range(stages)))
