"""The proof that a schedule can be carried out, and what the runtime needs to do so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from pipepart.errors import ScheduleError
from pipepart.schedule.actions import COMPUTE, Action, Edges, Message, Schedule
from pipepart.schedule.deadlock import check_blocking, check_messages, check_ordered
from pipepart.schedule.dependencies import ActionGraph
from pipepart.schedule.messages import Program, channels, pairs_of, program

__all__ = ["Validated", "peak_activations", "validate", "validate_program"]

Pair = tuple[int, int]


@dataclass(frozen=True)
class Validated:
    """A schedule that was proved, with its messages."""

    schedule: Schedule = field(repr=False)
    edges: Edges
    channels: Mapping[Pair, tuple[Message, ...]] = field(repr=False)
    """Per (sender stage, receiver stage): the messages in the order of their sending."""
    pair_order: Mapping[Pair, tuple[Message, ...]] = field(repr=False)
    """Per (lower stage, higher stage): all messages both ways in the one order in which both must issue them."""
    program: Program = field(repr=False)
    """Per stage: compute, SEND and RECV in an order that blocking sends carry out."""
    peak_activations: tuple[float, ...]
    """Per stage: the most that its live activations weigh together (counted in micro-batches of chunks by default)."""
    tied_order: tuple[tuple[int, ...], ...]
    """Stages of each tied group that spans several, in the order in which all reduce, after their last backward."""


def peak_activations(
    schedule: Schedule, activation: Sequence[float] | None = None, kept_for_weight: float = 1.0
) -> tuple[float, ...]:
    """Per stage: the most that is live at once. It follows from the order alone, whatever the times."""
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
            elif action.kind == "B":
                live -= size
            else:
                live -= size * (kept_for_weight if action.kind == "W" else 1 - kept_for_weight)
        peaks.append(peak)
    return tuple(peaks)


def _check_form(schedule: Schedule) -> None:
    """Every action is a compute action on the stage of its chunk, for a micro-batch that exists."""
    name = schedule.name
    if len(schedule.actions) != schedule.stages:
        raise ScheduleError(f"{name}: {schedule.stages} stages, but lists of actions for {len(schedule.actions)}")
    for chunk, stage in enumerate(schedule.placement):
        if not 0 <= stage < schedule.stages:
            raise ScheduleError(
                f"{name}: chunk {chunk} is placed on stage {stage}; stages are 0..{schedule.stages - 1}"
            )
    for stage, actions in enumerate(schedule.actions):
        for at, action in enumerate(actions):
            where = f"{name}: stage {stage}, action {at} ({action})"
            if action.kind not in COMPUTE:
                raise ScheduleError(f"{where}: expected one of {', '.join(COMPUTE)}; messages follow from the schedule")
            if not 0 <= action.chunk < schedule.chunks:
                raise ScheduleError(f"{where}: there is no chunk {action.chunk}; chunks are 0..{schedule.chunks - 1}")
            if schedule.placement[action.chunk] != stage:
                home = schedule.placement[action.chunk]
                raise ScheduleError(f"{where}: chunk {action.chunk} is on stage {home}; move the action there")
            if not 0 <= action.microbatch < schedule.microbatches:
                raise ScheduleError(
                    f"{where}: there is no micro-batch {action.microbatch}; they are 0..{schedule.microbatches - 1}"
                )


def _check_complete(schedule: Schedule) -> None:
    """Each micro-batch passes each chunk once per direction, and on its stage in the order F, then B or I, then W."""
    name = schedule.name
    seen: dict[tuple[str, int, int], int] = {}
    for stage, actions in enumerate(schedule.actions):
        for at, action in enumerate(actions):
            key = (action.kind, action.chunk, action.microbatch)
            if key in seen:
                raise ScheduleError(f"{name}: stage {stage} does {action} twice, as actions {seen[key]} and {at}")
            seen[key] = at
    for chunk, stage in enumerate(schedule.placement):
        for k in range(schedule.microbatches):
            f, b, i, w = (seen.get((kind, chunk, k)) for kind in COMPUTE)
            if f is None:
                raise ScheduleError(f"{name}: {Action('F', chunk, k)} is missing on stage {stage}")
            if schedule.forward_only:
                continue
            if b is not None and (i is not None or w is not None):
                other = Action("I" if i is not None else "W", chunk, k)
                raise ScheduleError(
                    f"{name}: stage {stage} does both {Action('B', chunk, k)} and {other}; B is both halves"
                )
            if b is None and (i is None or w is None):
                lacking = Action("B" if i is None and w is None else "I" if i is None else "W", chunk, k)
                raise ScheduleError(f"{name}: {lacking} is missing on stage {stage}")
            steps = [(at, kind) for at, kind in ((f, "F"), (b, "B"), (i, "I"), (w, "W")) if at is not None]
            for (first, before), (second, after) in pairwise(steps):
                if second < first:
                    raise ScheduleError(
                        f"{name}: dependency broken: stage {stage} does {Action(after, chunk, k)} (action {second}) "
                        f"before {Action(before, chunk, k)} (action {first})"
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
    """Prove a schedule: complete, in an order that can be carried out, without deadlock, within memory.

    Edges are pairs (earlier chunk, later chunk), the chain by default; ``tied`` are groups of chunks with a common
    parameter. ``activation`` weighs one micro-batch of each chunk (1 by default), ``memory_limit`` is per stage.
    """
    edges = Edges.of(schedule.chunks, forward_edges, backward_edges, tied)
    _check_form(schedule)
    _check_complete(schedule)
    if schedule.forward_only:
        edges = Edges(edges.forward, frozenset(), edges.tied)
    graph = ActionGraph.of(schedule, edges)
    full = program(schedule, edges.forward, edges.backward, graph=graph)
    check_messages(schedule.name, full, schedule.placement, edges)
    check_blocking(schedule.name, full, schedule.placement)
    check_ordered(schedule.name, full, schedule.placement)
    peaks = peak_activations(schedule, activation)
    for stage, peak in enumerate(peaks):
        if memory_limit is not None and peak > memory_limit[stage] * (1 + 1e-9):
            raise ScheduleError(
                f"{schedule.name}: stage {stage} keeps {peak:g} of activations at its peak, the limit is "
                f"{memory_limit[stage]:g}; fewer micro-batches in flight (less slack, '1f1b'), recompute or more stages"
            )
    groups = (tuple(sorted({schedule.placement[chunk] for chunk in group})) for group in edges.tied)
    return Validated(
        schedule,
        edges,
        channels(schedule, edges.forward, edges.backward),
        pairs_of(full, schedule.placement),
        full,
        peaks,
        tuple(stages for stages in groups if len(stages) > 1),
    )


def validate_program(
    program: Sequence[Sequence[Action]],
    forward_edges: Iterable[Pair] | None = None,
    backward_edges: Iterable[Pair] | None = None,
    *,
    blocking: bool = True,
    ordered: bool = True,
    name: str = "program",
) -> Validated:
    """Prove lists that bring their own SEND and RECV: the compute as `validate` does, and the messages as given."""
    schedule = compute_of(program, name)
    proof = validate(schedule, forward_edges, backward_edges)
    check_messages(name, program, schedule.placement, proof.edges)
    if blocking:
        check_blocking(name, program, schedule.placement)
    if ordered:
        check_ordered(name, program, schedule.placement)
    pairs = pairs_of(program, schedule.placement) if ordered else proof.pair_order
    return Validated(
        schedule,
        proof.edges,
        proof.channels,
        pairs,
        tuple(map(tuple, program)),
        proof.peak_activations,
        proof.tied_order,
    )


def compute_of(program: Sequence[Sequence[Action]], name: str) -> Schedule:
    """The schedule inside a program: its compute actions, with the placement that they show."""
    lists = tuple(tuple(action for action in actions if action.kind in COMPUTE) for actions in program)
    home: dict[int, int] = {}
    microbatches = 0
    for stage, actions in enumerate(lists):
        for action in actions:
            if home.setdefault(action.chunk, stage) != stage:
                raise ScheduleError(
                    f"{name}: {action} is on stage {stage}, but chunk {action.chunk} is on stage {home[action.chunk]} "
                    "as well; a chunk has one stage"
                )
            microbatches = max(microbatches, action.microbatch + 1)
    if sorted(home) != list(range(len(home))):
        lacking = next(c for c in range(len(home) + 1) if c not in home)
        raise ScheduleError(f"{name}: chunk {lacking} has no action; chunks are numbered 0, 1, ... without a gap")
    return Schedule(name, len(lists), microbatches, tuple(home[c] for c in range(len(home))), lists)
