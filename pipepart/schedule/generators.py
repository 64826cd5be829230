"""Schedules with a full backward: GPipe, 1F1B, interleaved 1F1B, and forward-only for evaluation.

Each generator gives the compute actions of every stage. The pictures are those of `gantt`: time runs to the right,
digits are forwards of micro-batches 0, 1, ..., letters A, B, ... their backwards, which take twice as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipepart.schedule.actions import Action, Schedule, looped_placement

__all__ = ["forward_only", "gpipe", "group_sizes", "interleaved", "one_f_one_b"]


def gpipe(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019). Bubble ``(p-1)(F+B)``, m activations per stage.

    ::

        stage  0  0123.........AABBCCDD
        stage  1  .0123......AABBCCDD..
        stage  2  ..0123...AABBCCDD....
        stage  3  ...0123AABBCCDD......

    With several chunks per stage: all micro-batches through a chunk, then through the next (breadth first).
    """
    placement = looped_placement(stages, chunks)

    def actions(stage: int) -> Iterator[Action]:
        held = range(stage, stages * chunks, stages)
        for chunk in held:
            yield from (Action("F", chunk, k) for k in range(microbatches))
        for chunk in reversed(held):
            yield from (Action("B", chunk, k) for k in range(microbatches))

    return Schedule("gpipe", stages, microbatches, placement, tuple(tuple(actions(s)) for s in range(stages)))


def one_f_one_b(stages: int, microbatches: int, slack: int = 0) -> Schedule:
    """One forward, one backward in turn (Narayanan et al. 2019): GPipe's bubble with ``p - i`` activations at stage i.

    ::

        stage  0  0123......AA4BB5CC.DD.EE.FF
        stage  1  .012....AA3BB4CC5DD.EE.FF..
        stage  2  ..01..AA2BB3CC4DD5EE.FF....
        stage  3  ...0AA1BB2CC3DD4EE5FF......

    ``slack`` lets that many more micro-batches in at the first stage before its first backward, and fewer at later
    stages, none at the last: the slack is a stock between neighbours. The step is the same when links are free and all
    takes its time exactly; when times vary, or links take time, a stage has work in hand while it waits. A slack of
    ``p - 1`` gives one micro-batch of stock at every cut. (The same extra on all stages would be of no use: the stock
    between two stages is the difference.)
    """

    def actions(stage: int) -> Iterator[Action]:
        after = stages - 1 - stage
        ahead = min(microbatches, after + 1 + (-(-slack * after // (stages - 1)) if after else 0))
        yield from (Action("F", stage, k) for k in range(ahead))
        for k in range(microbatches):
            yield Action("B", stage, k)
            if k + ahead < microbatches:
                yield Action("F", stage, k + ahead)

    placement = looped_placement(stages, 1)
    return Schedule("1f1b", stages, microbatches, placement, tuple(tuple(actions(s)) for s in range(stages)))


def group_sizes(stages: int, microbatches: int) -> tuple[int, ...]:
    """Micro-batches in as many groups of at least p as there can be, sizes as equal as possible, larger ones first."""
    groups = max(1, microbatches // stages)
    size, larger = divmod(microbatches, groups)
    return (size + 1,) * larger + (size,) * (groups - larger)


def _looped_order(held: Sequence[int], groups: Sequence[int]) -> list[tuple[int, int]]:
    """(chunk, micro-batch) group by group: a group passes all the stage's chunks before the next group starts."""
    order, first = [], 0
    for size in groups:
        order += [(chunk, k) for chunk in held for k in range(first, first + size)]
        first += size
    return order


def interleaved(stages: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B over v chunks per stage (Narayanan et al. 2021): bubble ``(p-1)(F+B)/v``, ``p + (p-1)/v`` activations.

    A stage holds chunks ``i, i+p, i+2p, ...``; micro-batches pass in groups of p, so that the first comes round to
    chunk ``i+p`` just when the last of the group has left chunk ``i``::

        stage  0 chunk  0  01..2...3...AA.BB......CCDD
        stage  0 chunk  2  ..01..AA.BB2..3...CC.DD....
        stage  1 chunk  1  .01......2AA3BB......CCDD..
        stage  1 chunk  3  ...0AA1BB......2CC3DD......

    Micro-batches that do not divide by p pass in groups of p or a few more; fewer than p make one small group.
    """
    placement = looped_placement(stages, chunks)
    groups = group_sizes(stages, microbatches)
    total = microbatches * chunks

    def actions(stage: int) -> Iterator[Action]:
        held = range(stage, stages * chunks, stages)
        forwards = _looped_order(held, groups)
        backwards = _looped_order(held[::-1], groups)
        after = stages - 1 - stage
        ahead = min(total, (chunks - 1) * groups[0] + 2 * after + 1 if chunks > 1 else after + 1)
        yield from (Action("F", *forwards[n]) for n in range(ahead))
        for n in range(total):
            yield Action("B", *backwards[n])
            if n + ahead < total:
                yield Action("F", *forwards[n + ahead])

    name = "interleaved"
    return Schedule(name, stages, microbatches, placement, tuple(tuple(actions(s)) for s in range(stages)))


def forward_only(stages: int, microbatches: int, placement: Sequence[int]) -> Schedule:
    """Forwards alone, for evaluation and prediction, over any placement of chunks.

    ::

        stage  0  0123...
        stage  1  .0123..
        stage  2  ..0123.
        stage  3  ...0123

    Over chunks placed in turn (0 1 2 0 1 2) micro-batches pass in the groups of `interleaved`. Over any other placement
    every stage takes what is ready in each unit of time, from its latest chunk or from its earliest, whichever is
    done sooner.
    """
    chunks = tuple(placement)
    if chunks == looped_placement(stages, len(chunks) // stages):
        groups = group_sizes(stages, microbatches)
        held = [range(stage, len(chunks), stages) for stage in range(stages)]
        orders = [[Action("F", *step) for step in _looped_order(mine, groups)] for mine in held]
    else:
        _, orders = min(
            (_taken(stages, microbatches, chunks, deep) for deep in (True, False)), key=lambda found: found[0]
        )
    return Schedule("forward", stages, microbatches, chunks, tuple(map(tuple, orders)))


def _taken(
    stages: int, microbatches: int, placement: Sequence[int], deep_first: bool
) -> tuple[int, list[list[Action]]]:
    """Units of time, and the forwards of every stage, when each takes what is ready: latest or earliest chunk first."""
    chunks = len(placement)
    in_turn = range(chunks - 1, -1, -1) if deep_first else range(chunks)
    held = [[c for c in in_turn if placement[c] == stage] for stage in range(stages)]
    arrived = [microbatches] + [0] * chunks
    done = [0] * chunks
    orders: list[list[Action]] = [[] for _ in range(stages)]
    units = 0
    while done[chunks - 1] < microbatches:
        taken = [next((c for c in mine if done[c] < arrived[c]), None) for mine in held]
        for stage, chunk in enumerate(taken):
            if chunk is not None:
                orders[stage].append(Action("F", chunk, done[chunk]))
                done[chunk] += 1
        for chunk in taken:
            if chunk is not None:
                arrived[chunk + 1] = done[chunk]
        units += 1
    return units, orders
