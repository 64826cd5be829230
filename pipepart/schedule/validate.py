"""The proof that a schedule can be carried out, and what the runtime needs to do so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipepart.schedule.actions import Edges, Message, Schedule
from pipepart.schedule.dependencies import ActionGraph
from pipepart.schedule.messages import channels, pair_order

__all__ = ["Validated", "validate"]

Pair = tuple[int, int]


@dataclass(frozen=True)
class Validated:
    """A schedule that was proved, with its messages."""

    schedule: Schedule
    edges: Edges
    channels: Mapping[Pair, tuple[Message, ...]]
    pair_order: Mapping[Pair, tuple[Message, ...]]


def validate(
    schedule: Schedule,
    forward_edges: Iterable[Pair] | None = None,
    backward_edges: Iterable[Pair] | None = None,
) -> Validated:
    edges = Edges.of(schedule.chunks, forward_edges, backward_edges)
    ActionGraph.of(schedule, edges).linear_order()
    return Validated(
        schedule,
        edges,
        channels(schedule, edges.forward, edges.backward),
        pair_order(schedule, edges.forward, edges.backward),
    )
