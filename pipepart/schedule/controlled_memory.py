"""Schedules over a V of two chunks per stage that trade time for memory, and DualPipeV.

V-Half and V-Min repeat the actions of one micro-batch every 6 units of time, the time of all its actions on a stage.
What a stage keeps is the time from each ``F`` to its ``W``, divided by 6: a micro-batch that passes the stages quickly
is soon gone (Qi et al. 2024, "Pipeline parallelism with controllable memory").
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import product

from pipepart.schedule.actions import Action, Schedule, v_placement
from pipepart.schedule.generators import in_turn
from pipepart.schedule.registry import named, schedule_of

__all__ = ["dualpipe_v", "v_half", "v_min"]

_PERIOD = 6
"""Units of time of the actions of a micro-batch on a stage: F, I and W of two chunks."""


def _offsets(stages: int, pace: tuple[int, int]) -> tuple[int, int, int]:
    """Return when a micro-batch starts its second ``F``, its first ``I`` and its second ``I`` at the ends of the V.

    ``pace`` are the units of time from stage to stage on the way to the last stage and on the way back. They are the
    least for which no two actions of a stage fall on the same unit of the period.
    """
    out, home = pace
    for late in product(range(_PERIOD), repeat=3):
        second = out * (stages - 1) + 1 + late[0]
        first_back = second + home * (stages - 1) + 1 + late[1]
        second_back = first_back + out * (stages - 1) + 1 + late[2]
        starts = (
            (out * s, second + home * (stages - 1 - s), first_back + out * s, second_back + home * (stages - 1 - s))
            for s in range(stages)
        )
        if all(len({start % _PERIOD for start in mine}) == len(mine) for mine in starts):
            return second, first_back, second_back
    raise AssertionError("there are offsets for every pace in use")


def _repeated(name: str, stages: int, microbatches: int, pace: tuple[int, int]) -> Schedule:
    """The schedule that repeats the actions of one micro-batch every period, in the order of their starts."""
    out, home = pace
    second, first_back, second_back = _offsets(stages, pace)

    def actions(stage: int) -> Iterator[Action]:
        early, late = stage, 2 * stages - 1 - stage
        starts = {
            ("F", early): out * stage,
            ("F", late): second + home * (stages - 1 - stage),
            ("I", late): first_back + out * stage,
            ("I", early): second_back + home * (stages - 1 - stage),
        }
        taken = {start % _PERIOD for start in starts.values()}
        for chunk in (late, early):
            start = next(
                t for t in range(starts["I", chunk] + 1, starts["I", chunk] + 1 + _PERIOD) if t % _PERIOD not in taken
            )
            starts["W", chunk] = start
            taken.add(start % _PERIOD)
        order = sorted(
            (start + _PERIOD * k, kind, chunk, k)
            for (kind, chunk), start in starts.items()
            for k in range(microbatches)
        )
        return (Action(kind, chunk, k) for _, kind, chunk, k in order)

    return schedule_of(name, stages, microbatches, v_placement(stages), actions)


@named(
    "v_half",
    "backward split, two chunks per stage in a V: half the activations of 1f1b",
    fixed_chunks=2,
    splits_backward=True,
)
def v_half(stages: int, microbatches: int) -> Schedule:
    """Half the memory of 1F1B's first stage, on every stage: about p/2 activations (Qi et al. 2024).

    A micro-batch takes two units of time from stage to stage on the way out, and one on the way back::

        stage  0 chunk  0  01......2....Aa3...Bb4...Cc...Dd...Ee
        stage  0 chunk  5  .....0Aa..1Bb...2Cc...3Dd..4Ee.......
        stage  1 chunk  1  .0...1....2A...a3B...b4C...c.D..d.Ee.
        stage  1 chunk  4  ....0..Aa1..Bb2...Cc3...Dd4...Ee.....
        stage  2 chunk  2  ..0...1...Aa2...Bb3...Cc4...Dd...Ee..
        stage  2 chunk  3  ...0...1Aa...2Bb...3Cc...4Dd...Ee....
    """
    return _repeated("v_half", stages, microbatches, (2, 1))


@named(
    "v_min",
    "backward split, two chunks per stage in a V: a third of the activations of 1f1b",
    fixed_chunks=2,
    splits_backward=True,
)
def v_min(stages: int, microbatches: int) -> Schedule:
    """A third of the memory of 1F1B's first stage, on every stage: about p/3 activations (Qi et al. 2024).

    A micro-batch passes the stages as fast as it can, one unit of time for each. The steady state has no bubble only if
    F = I = W::

        stage  0 chunk  0  0.....1.....2A..a.3B..b.4C..c..D..d..Ee
        stage  0 chunk  5  .....0.Aa..1..Bb.2..Cc.3..Dd.4..Ee.....
        stage  1 chunk  1  .0.....1....A2a...B3b...C4c...Dd....Ee.
        stage  1 chunk  4  ....0...A.1a...B2b...C3c...D4d...Ee....
        stage  2 chunk  2  ..0.....1..A.a2..B.b3..C.c4..D.d...E.e.
        stage  2 chunk  3  ...0.....1A.a..2B.b..3C.c..4D.d...E.e..
    """
    return _repeated("v_min", stages, microbatches, (1, 1))


@named(
    "dualpipe_v",
    "two chunks per stage in a V, backward split where stages would wait: p + 1/2 activations on every stage",
    fixed_chunks=2,
    splits_backward=True,
)
def dualpipe_v(stages: int, microbatches: int) -> Schedule:
    """DualPipe cut in half (DeepSeek 2025): a V of two chunks per stage, with a forward beside each backward.

    The steady state has full backwards, which are shorter than their halves; only stages that would wait split them::

        stage  0 chunk  0  01234.......5...AA6...BB....CC....DD..EeFfGg
        stage  0 chunk  5  .....0Aa1Bb2.CC3...DD4..EE5...FF6...GG......
        stage  1 chunk  1  .012.3....4...AA5...BB6...CC....DD..EE.F.Gfg
        stage  1 chunk  4  ....0.1Aa2.BB3...CC4...DD5..EE6...FF..G.g...
        stage  2 chunk  2  ..0.1.2.3...AA4...BB5...CC6...DD..EE..F.Gf.g
        stage  2 chunk  3  ...0.1.2.AA3...BB4...CC5...DD6..EE..FF.G..g.
    """
    if microbatches < 2 * stages:
        _, orders = in_turn(stages, microbatches, v_placement(stages))
        return schedule_of("dualpipe_v", stages, microbatches, v_placement(stages), orders.__getitem__)

    def actions(stage: int) -> Iterator[Action]:
        after, chunks = stages - 1 - stage, (stage, 2 * stages - 1 - stage)
        count = dict.fromkeys(("F0", "F1", "B0", "B1", "W0", "W1"), 0)

        def take(*names: str) -> Iterator[Action]:
            """The next action of each name, such as I1; I and B count together."""
            for name in names:
                key = ("B" if name[0] == "I" else name[0]) + name[1]
                if name[0] == "B":
                    count["W" + name[1]] += 1
                yield Action(name[0], chunks[int(name[1])], count[key])
                count[key] += 1

        yield from take(*("F0",) * (2 * after))
        for _ in range(stage + 1):
            yield from take("F0", "F1")
        for _ in range(after):
            yield from take("I1", "W1", "F1")
        for _ in range(microbatches - 2 * stages + stage + 1):
            yield from take("F0", "B1", "F1", "B0")
        for _ in range(after):
            yield from take("B1", "F1", "B0")
        half, late = (stage + 1) // 2, deque[str]()
        for n in range(stage + 1):
            for chunk in "10":
                split = n > half or (n == half and (stage % 2 == 1 or chunk == "0"))
                yield from take(f"{'I' if split else 'B'}{chunk}")
                late += [f"W{chunk}"] * split
        for _ in range(after):
            yield from take(*([late.popleft()] if late else []), "I0")
            late.append("W0")
        yield from take(*late)

    return schedule_of("dualpipe_v", stages, microbatches, v_placement(stages), actions)
