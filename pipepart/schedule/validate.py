"""The check that a schedule can be carried out, with its messages for the runtime."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from pipepart.errors import ScheduleError
from pipepart.schedule.actions import COMPUTE, Action, Edges, Message, Schedule
from pipepart.schedule.dependencies import ActionGraph, Numbered
from pipepart.schedule.messages import (
    Messages,
    Program,
    all_meet,
    check_blocking,
    check_messages,
    check_ordered,
    lower,
    meetings,
    pairs_of,
)

__all__ = ["Validated", "compute_of", "peak_activations", "validate", "validate_program"]

Pair = tuple[int, int]


@dataclass(frozen=True)
class Validated:
    """A schedule that was validated. Its messages are computed on first use."""

    schedule: Schedule = field(repr=False)
    edges: Edges
    peak_activations: tuple[float, ...]
    """Largest live activations of each stage, by default counted in micro-batches of chunks."""
    tied_order: tuple[tuple[int, ...], ...]
    """Stages of each tied group that spans several, in the order of the reductions after the last backward."""
    graph: ActionGraph = field(repr=False, compare=False)
    given: Program | None = field(default=None, repr=False)
    """The validated lists with explicit messages, if any."""

    @cached_property
    def _messages(self) -> Messages:
        return lower(self.graph)

    @property
    def channels(self) -> Mapping[Pair, tuple[Message, ...]]:
        """Per (sender stage, receiver stage): the messages in the order of their sending."""
        return self._messages.channels

    @property
    def pair_order(self) -> Mapping[Pair, tuple[Message, ...]]:
        """Per (lower stage, higher stage): all messages of both directions, in the order in which both issue them."""
        return self._messages.pair_order if self.given is None else pairs_of(self.given, self.schedule.placement)

    @property
    def program(self) -> Program:
        """Compute, SEND and RECV of each stage, as given or in an order that blocking sends carry out."""
        return self._messages.program if self.given is None else self.given


def peak_activations(
    schedule: Schedule, activation: Sequence[float] | None = None, kept_for_weight: float = 1.0
) -> tuple[float, ...]:
    """Largest live activations of each stage. They follow from the order alone, not from the times."""
    peaks = []
    for actions in schedule.actions:
        live = peak = 0.0
        for action in actions:
            size = 1.0 if activation is None else activation[action.chunk]
            if action.kind == "F":
                live += size
                peak = max(peak, live)
                if schedule.forward_only:
                    live -= size
            else:
                live -= size * {"B": 1.0, "I": 1 - kept_for_weight, "W": kept_for_weight}[action.kind]
        peaks.append(peak)
    return tuple(peaks)


def _check_form(schedule: Schedule) -> None:
    """Check that there is a list of actions per stage, and that every chunk is on a stage."""
    name = schedule.name
    if len(schedule.actions) != schedule.stages:
        raise ScheduleError(
            f"{name}: {schedule.stages} stages, but lists of actions for {len(schedule.actions)}; expected one per stage"
        )
    for chunk, stage in enumerate(schedule.placement):
        if not 0 <= stage < schedule.stages:
            raise ScheduleError(f"{name}: chunk {chunk} is on stage {stage}; stages are 0..{schedule.stages - 1}")


def _check_complete(schedule: Schedule, numbered: Numbered) -> None:
    """Check that each micro-batch passes each chunk once per direction, in the order F, then B or I, then W."""
    forward_only = schedule.forward_only
    tables = [numbered.number[kind] for kind in COMPUTE]
    for at, (f, b, i, w) in enumerate(zip(*tables)):
        if f >= 0 and ((f < b and i < 0 and w < 0) or (b < 0 and f < i < w) or forward_only):
            continue
        chunk, k = divmod(at, schedule.microbatches)
        raise ScheduleError(f"{schedule.name}: {_what_is_wrong(schedule, numbered, chunk, k, (f, b, i, w))}")


def _what_is_wrong(schedule: Schedule, numbered: Numbered, chunk: int, k: int, found: tuple[int, ...]) -> str:
    """Error text for a micro-batch that does not pass a chunk correctly; ``found`` are the numbers of F, B, I, W."""
    stage = schedule.placement[chunk]
    f, b, i, w = found
    if f < 0:
        return f"{Action('F', chunk, k)} is missing on stage {stage}"
    if b >= 0 and (i >= 0 or w >= 0):
        other = Action("I" if i >= 0 else "W", chunk, k)
        return f"stage {stage} does both {Action('B', chunk, k)} and {other}; B stands for I and W"
    if b < 0 and (i < 0 or w < 0):
        kind = "B" if i < 0 and w < 0 else "I" if i < 0 else "W"
        return f"{Action(kind, chunk, k)} is missing on stage {stage}"
    later, earlier = next((y, x) for x, y in pairwise(n for n in found if n >= 0) if y < x)
    start = numbered.first[stage]
    return (
        f"dependency broken: stage {stage} does {numbered.actions[later]} (action {later - start}) before "
        f"{numbered.actions[earlier]} (action {earlier - start})"
    )


def validate(
    schedule: Schedule,
    forward_edges: Iterable[Pair] | None = None,
    backward_edges: Iterable[Pair] | None = None,
    *,
    tied: Iterable[Iterable[int]] = (),
    activation: Sequence[float] | None = None,
    memory_limit: Sequence[float] | None = None,
) -> Validated:
    """Check that a schedule is complete, in an order that can be carried out, free of deadlocks, and within memory.

    Edges are pairs (earlier chunk, later chunk), the chain by default; ``tied`` are groups of chunks with a common
    parameter. ``activation`` is the size of one micro-batch of each chunk (1 by default), ``memory_limit`` is per stage.
    """
    edges = Edges.of(schedule.chunks, forward_edges, backward_edges, tied)
    _check_form(schedule)
    numbered = Numbered.of(schedule)
    _check_complete(schedule, numbered)
    if schedule.forward_only:
        edges = Edges(edges.forward, frozenset(), edges.tied)
    graph = ActionGraph.of(schedule, edges, numbered)
    # Ordered channels carry out everything that blocking sends do: where both ends meet, they meet in one order.
    assert all_meet(meetings(graph)), "messages in the order of one run always meet"
    peaks = peak_activations(schedule, activation)
    for stage, peak in enumerate(peaks):
        if memory_limit is not None and peak > memory_limit[stage] * (1 + 1e-9):
            raise ScheduleError(
                f"{schedule.name}: stage {stage} keeps {peak:g} of activations at its peak, the limit is "
                f"{memory_limit[stage]:g}; use fewer micro-batches in flight (less slack, '1f1b'), recompute or more stages"
            )
    groups = (tuple(sorted({schedule.placement[chunk] for chunk in group})) for group in edges.tied)
    tied_order = tuple(stages for stages in groups if len(stages) > 1)
    return Validated(schedule, edges, peaks, tied_order, graph)


def validate_program(
    program: Sequence[Sequence[Action]],
    forward_edges: Iterable[Pair] | None = None,
    backward_edges: Iterable[Pair] | None = None,
    *,
    blocking: bool = True,
    ordered: bool = True,
    microbatches: int | None = None,
    name: str = "program",
) -> Validated:
    """Check lists with explicit SEND and RECV: the compute actions as in `validate`, and the messages as given.

    ``microbatches`` defaults to the number in the lists.
    """
    schedule = compute_of(program, name, microbatches)
    proof = validate(schedule, forward_edges, backward_edges)
    check_messages(name, program, schedule.placement, proof.edges)
    if blocking:
        check_blocking(name, program, schedule.placement)
    if ordered:
        check_ordered(name, program, schedule.placement)
    return replace(proof, given=tuple(map(tuple, program)))


def compute_of(program: Sequence[Sequence[Action]], name: str, microbatches: int | None = None) -> Schedule:
    """The schedule inside a program: its compute actions, with the placement that follows from them."""
    lists = tuple(tuple(action for action in actions if action.kind in COMPUTE) for actions in program)
    home: dict[int, int] = {}
    named = 0
    for stage, actions in enumerate(lists):
        for action in actions:
            if home.setdefault(action.chunk, stage) != stage:
                raise ScheduleError(
                    f"{name}: {action} is on stage {stage}, but chunk {action.chunk} is on stage {home[action.chunk]} "
                    "as well; a chunk has one stage"
                )
            named = max(named, action.microbatch + 1)
    if sorted(home) != list(range(len(home))):
        lacking = next(c for c in range(len(home) + 1) if c not in home)
        raise ScheduleError(f"{name}: chunk {lacking} has no action; chunks are numbered 0, 1, ... without a gap")
    count = named if microbatches is None else microbatches
    return Schedule(name, len(lists), count, tuple(home[c] for c in range(len(home))), lists)
