"""Generators of schedules: the compute actions of every stage, by a fixed rule.

GPipe, 1F1B and interleaved 1F1B have a full backward ``B``. The zero-bubble schedules split it into ``I`` (input
gradient, which other stages wait for) and ``W`` (weight gradient), which can run at any later time and fills idle time
(Qi et al. 2023). The pictures are those of `gantt`: time runs to the right, digits are forwards of micro-batches
0, 1, ..., capital letters A, B, ... their ``B`` (twice as long as a forward) or ``I``, small letters their ``W``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipepart.schedule.actions import Action, Schedule, looped_placement, v_placement
from pipepart.schedule.registry import named, schedule_of

__all__ = ["forward_only", "gpipe", "in_turn", "interleaved", "one_f_one_b", "zb_h1", "zb_h2", "zb_v"]


@named("gpipe", "all forwards, then all backwards")
def gpipe(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019). Bubble ``(p-1)(F+B)``, m activations per stage.

    ::

        stage  0  0123.........AABBCCDD
        stage  1  .0123......AABBCCDD..
        stage  2  ..0123...AABBCCDD....
        stage  3  ...0123AABBCCDD......

    With several chunks per stage: all micro-batches through a chunk, then through the next (breadth first).
    """

    def actions(stage: int) -> Iterator[Action]:
        held = range(stage, stages * chunks, stages)
        for chunk in held:
            yield from (Action("F", chunk, k) for k in range(microbatches))
        for chunk in reversed(held):
            yield from (Action("B", chunk, k) for k in range(microbatches))

    return schedule_of("gpipe", stages, microbatches, looped_placement(stages, chunks), actions)


@named("1f1b", "one forward, one backward in turn: p - i activations at stage i", fixed_chunks=1, takes_slack=True)
def one_f_one_b(stages: int, microbatches: int, slack: int = 0) -> Schedule:
    """One forward, one backward in turn (Narayanan et al. 2019): GPipe's bubble with ``p - i`` activations at stage i.

    ::

        stage  0  0123......AA4BB5CC.DD.EE.FF
        stage  1  .012....AA3BB4CC5DD.EE.FF..
        stage  2  ..01..AA2BB3CC4DD5EE.FF....
        stage  3  ...0AA1BB2CC3DD4EE5FF......

    With ``slack``, the first stage starts that many more micro-batches before its first backward, later stages fewer and
    the last none, so that micro-batches wait in reserve between neighbours. The step time is the same if links are free
    and times are exact; if times vary or links take time, a stage has other work while it waits. A slack of ``p - 1``
    gives a reserve of one micro-batch at every cut. The same number on all stages would have no effect, since the
    reserve between two stages is the difference of their numbers.
    """

    def actions(stage: int) -> Iterator[Action]:
        after = stages - 1 - stage
        ahead = min(microbatches, after + 1 + (-(-slack * after // (stages - 1)) if after else 0))
        yield from (Action("F", stage, k) for k in range(ahead))
        for k in range(microbatches):
            yield Action("B", stage, k)
            if k + ahead < microbatches:
                yield Action("F", stage, k + ahead)

    return schedule_of("1f1b", stages, microbatches, range(stages), actions)


def _group_sizes(stages: int, microbatches: int) -> tuple[int, ...]:
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


@named("interleaved", "1f1b over several chunks per stage: the bubble divided by their number", usual_chunks=2)
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
    groups = _group_sizes(stages, microbatches)
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

    return schedule_of("interleaved", stages, microbatches, looped_placement(stages, chunks), actions)


def _delayed_weights(name: str, stages: int, microbatches: int, depth: int) -> Schedule:
    """1F1B order with delayed ``W``: stage i starts ``depth (p-1-i) + 1`` micro-batches, ``W`` lags by ``depth i``.

    Later stages have fewer micro-batches in flight and more delayed ``W``: the peak is the same on all stages, and the
    gradients travel upstream without waiting for any ``W``.
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

    return schedule_of(name, stages, microbatches, range(stages), actions)


@named("zb_h1", "backward split, weights held back: p activations on every stage", fixed_chunks=1, splits_backward=True)
def zb_h1(stages: int, microbatches: int) -> Schedule:
    """Zero bubble with the memory of 1F1B's first stage: bubble ``(p-1)(F+I-W)``, p activations on every stage.

    ::

        stage  0  0123...Aa4Bb5CcDdEeFf
        stage  1  .012..A3Ba4Cb5DcEdFef
        stage  2  ..01.A2B3Ca4Db5EcFdef
        stage  3  ...0A1B2C3Da4Eb5Fcdef
    """
    return _delayed_weights("zb_h1", stages, microbatches, 1)


@named(
    "zb_h2",
    "backward split, more micro-batches in flight: 2p - 1 activations on every stage",
    fixed_chunks=1,
    splits_backward=True,
)
def zb_h2(stages: int, microbatches: int) -> Schedule:
    """Zero bubble with twice the memory: bubble ``(p-1)(F+I-2W)``, 2p-1 activations on every stage.

    That is the bubble of consecutive steps: a stage starts its next step while later stages finish this one. With a
    barrier after each step, the late start of the last stage remains.

    ::

        stage  0  01234Aa5BbCcDdEeFf..
        stage  1  .012A3B4Ca5DbEcFdef.
        stage  2  ..0A1B2C3D4Ea5Fbcdef
    """
    return _delayed_weights("zb_h2", stages, microbatches, 2)


@named(
    "zb_v",
    "backward split, two chunks per stage placed in a V: p activations on every stage",
    fixed_chunks=2,
    splits_backward=True,
)
def zb_v(stages: int, microbatches: int) -> Schedule:
    """Two chunks per stage placed down and up again (Qi et al. 2023, section 6): no bubble when F = I = W.

    The first stage holds the first and the last chunk, so backwards start as soon as the first micro-batch has passed
    all chunks, and p activations per stage are enough to be busy from a stage's first forward to the end::

        stage  0 chunk  0  01234.........Aa...Bb...CcDdEe..
        stage  0 chunk  5  .....0Aa1Bb2Cc..3Dd..4Ee........
        stage  1 chunk  1  .012.3......4Aa...Bb...C.DcEd.e.
        stage  1 chunk  4  ....0.1Aa2Bb...3Cc..4Dd.E....e..
        stage  2 chunk  2  ..0.1.2...3Aa...4Bb...C.D.Ec..de
        stage  2 chunk  3  ...0.1.2Aa...3Bb...4Cc.D.E..de..

    The order is a fixed pattern, without idle time from about 1.5 p micro-batches on. For p micro-batches and fewer,
    memory is no limit, and plain list scheduling (backwards first, later chunk first) is optimal.
    """
    if microbatches > stages:
        return _zb_v_pattern(stages, microbatches)
    _, orders = in_turn(stages, microbatches, v_placement(stages))
    return schedule_of("zb_v", stages, microbatches, v_placement(stages), orders.__getitem__)


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

    return schedule_of("zb_v", stages, microbatches, v_placement(stages), actions)


@named("forward", "forwards alone, for evaluation")
def forward_only(stages: int, microbatches: int, chunks: int = 1, placement: Sequence[int] | None = None) -> Schedule:
    """Forwards alone, for evaluation and prediction, over any placement of chunks.

    ::

        stage  0  0123...
        stage  1  .0123..
        stage  2  ..0123.
        stage  3  ...0123

    Over chunks placed in turn (0 1 2 0 1 2), which is the default, micro-batches pass in the groups of `interleaved`.
    Over any other placement every stage takes a ready micro-batch in each unit of time, from its latest chunk or from
    its earliest, whichever order ends sooner.
    """
    placement = looped_placement(stages, chunks) if placement is None else tuple(placement)
    if placement == looped_placement(stages, len(placement) // stages):
        groups = _group_sizes(stages, microbatches)
        held = [range(stage, len(placement), stages) for stage in range(stages)]
        orders = [[Action("F", *pair) for pair in _looped_order(mine, groups)] for mine in held]
    else:
        both = (in_turn(stages, microbatches, placement, backward=False, deep_first=deep) for deep in (True, False))
        _, orders = min(both, key=lambda found: found[0])
    return schedule_of("forward", stages, microbatches, placement, orders.__getitem__)


def in_turn(
    stages: int, microbatches: int, placement: Sequence[int], *, backward: bool = True, deep_first: bool = True
) -> tuple[int, list[list[Action]]]:
    """Units of time, and the actions of every stage, if each takes one ready action in each unit of time.

    It takes ``I`` before ``F`` before ``W``: of ``I`` and ``W`` the oldest micro-batch, of ``F`` the latest chunk, or
    the earliest without ``deep_first``. Without ``backward`` there are forwards alone.
    """
    chunks = len(placement)
    held = [[c for c in reversed(range(chunks)) if placement[c] == stage] for stage in range(stages)]
    done = {kind: [0] * chunks for kind in "FIW"}
    ahead, back, weights = done.values()
    orders: list[list[Action]] = [[] for _ in range(stages)]

    def choose(mine: Sequence[int]) -> tuple[str, int] | None:
        if backward:
            after = {c: min(ahead[c], back[c + 1] if c + 1 < chunks else microbatches) for c in mine}
            if ready := [c for c in mine if back[c] < after[c]]:
                return "I", min(ready, key=back.__getitem__)
        if ready := [c for c in mine if ahead[c] < (ahead[c - 1] if c else microbatches)]:
            return "F", ready[0 if deep_first else -1]
        if ready := [c for c in mine if backward and weights[c] < back[c]]:
            return "W", min(ready, key=weights.__getitem__)
        return None

    units = 0
    while min(weights if backward else ahead) < microbatches:
        for stage, choice in enumerate([choose(mine) for mine in held]):
            if choice is not None:
                kind, chunk = choice
                orders[stage].append(Action(kind, chunk, done[kind][chunk]))
                done[kind][chunk] += 1
        units += 1
    return units, orders
