"""The costs of the actions of a schedule, and the step time that no schedule can beat with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipepart.errors import ScheduleError
from pipepart.schedule.actions import Edges

__all__ = ["ChunkCosts", "lower_bound"]

Pair = tuple[int, int]
Node = tuple[str, int]
"""Kind and chunk of an action of one micro-batch."""

_PER_CHUNK = (
    "forward", "backward_input", "backward_weight", "backward", "recompute", "activation", "reduce",
    "handling_forward", "handling_backward",
)  # fmt: skip


@dataclass(frozen=True)
class ChunkCosts:
    """Seconds per chunk for one micro-batch, seconds per edge, and the size of activations.

    A full backward takes ``backward_input + backward_weight`` unless ``backward`` is given (splitting it can take
    time). An edge is the pair (earlier chunk, later chunk), for gradients too. Edges between chunks on the same stage
    are free, whatever their cost here.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    backward: tuple[float, ...] = ()
    recompute: tuple[float, ...] = ()
    """Seconds added to the backward (``B`` or ``I``) of each chunk, for the forward that is run again."""
    activation: tuple[float, ...] = ()
    """Size that one micro-batch keeps on the device for each chunk, from its ``F`` to the end of its ``B`` or ``W``."""
    kept_for_weight: float = 1.0
    """The part of an activation that stays between ``I`` and ``W``."""
    send_forward: Mapping[Pair, float] = field(default_factory=dict)
    send_backward: Mapping[Pair, float] = field(default_factory=dict)
    handling_forward: tuple[float, ...] = ()
    """Host overhead per ``F``, in seconds: receiving, sending, starting it."""
    handling_backward: tuple[float, ...] = ()
    """Host overhead per ``B`` or ``I``, in seconds."""
    contention: bool = False
    """Whether a stage sends and receives one message at a time, instead of any number at once."""
    reduce: tuple[float, ...] = ()
    """Seconds to sum the gradients of each chunk over replicas once they are final, one after the other per stage."""
    reduce_tied: tuple[float, ...] = ()
    """Seconds to sum the gradients of each group in `Edges.tied`, after all other work of its stages."""

    def __post_init__(self) -> None:
        chunks = len(self.forward)
        fill = {
            "backward": tuple(i + w for i, w in zip(self.backward_input, self.backward_weight)),
            "activation": (1.0,) * chunks,
        }
        for name in _PER_CHUNK:
            values = getattr(self, name) or fill.get(name, (0.0,) * chunks)
            object.__setattr__(self, name, tuple(float(value) for value in values))
            if len(values) != chunks:
                raise ScheduleError(f"costs: expected {chunks} entries in {name!r}, one per chunk, got {len(values)}")
            if any(not value >= 0 for value in values):
                raise ScheduleError(f"costs: {name} is {tuple(values)}; expected numbers >= 0")
        for name in ("send_forward", "send_backward"):
            for pair, seconds in getattr(self, name).items():
                if not seconds >= 0:
                    raise ScheduleError(f"costs: {name} of edge {pair[0]}>{pair[1]} is {seconds}; expected >= 0")
        if not 0 <= self.kept_for_weight <= 1:
            raise ScheduleError(f"costs: kept_for_weight is {self.kept_for_weight}; expected 0 to 1")

    @property
    def chunks(self) -> int:
        return len(self.forward)

    @property
    def edges(self) -> Edges:
        """The edges that have a cost here, or the plain chain if none has."""
        if not self.send_forward and not self.send_backward:
            return Edges.chain(self.chunks)
        return Edges.of(self.chunks, set(self.send_forward) | set(self.send_backward), set(self.send_backward))

    @staticmethod
    def even(
        stages: int,
        chunks: int = 1,
        *,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        send: float = 0.0,
        activation: float = 1.0,
    ) -> ChunkCosts:
        """Equal stages of ``chunks`` chunks each; times and activation are those of a whole stage."""
        total = stages * chunks

        def share(value: float) -> tuple[float, ...]:
            return (value / chunks,) * total

        links = dict.fromkeys(Edges.chain(total).forward, send) if send else {}
        return ChunkCosts(
            share(forward),
            share(backward_input),
            share(backward_weight),
            activation=share(activation),
            send_forward=links,
            send_backward=links,
        )

    def durations(self) -> Mapping[str, Sequence[float]]:
        """Seconds of each compute action: kind, then chunk."""
        return {
            "F": self.forward,
            "B": tuple(b + r for b, r in zip(self.backward, self.recompute)),
            "I": tuple(i + r for i, r in zip(self.backward_input, self.recompute)),
            "W": self.backward_weight,
        }

    def link(self, payload: str, source: int, target: int, placement: Sequence[int]) -> float:
        """Seconds of the activation (``F``) or the gradient (``B``) of an edge; 0 within a stage."""
        if placement[source] == placement[target]:
            return 0.0
        return (self.send_forward if payload == "F" else self.send_backward).get((source, target), 0.0)

    def handling(self) -> Mapping[str, Sequence[float]]:
        """Seconds of host overhead before each compute action: kind, then chunk."""
        back = self.handling_backward
        return {"F": self.handling_forward, "B": back, "I": back, "W": (0.0,) * self.chunks}


@dataclass(frozen=True)
class _Paths:
    """One micro-batch alone: its actions in a topological order, their times, and the users of their results."""

    order: tuple[Node, ...]
    seconds: dict[Node, float]
    after: dict[Node, list[tuple[Node, float]]]
    """Users of a result, with the time of the link to them."""

    @staticmethod
    def of(placement: Sequence[int], costs: ChunkCosts, edges: Edges, split: bool) -> _Paths:
        table = costs.durations()
        chunks = range(len(placement))
        back = "I" if split else "B"
        order = [("F", c) for c in chunks] + [(back, c) for c in reversed(chunks)]
        order += [("W", c) for c in chunks] if split else []
        after: dict[Node, list[tuple[Node, float]]] = {node: [] for node in order}
        for c in chunks:
            after["F", c].append(((back, c), 0.0))
            if split:
                after["I", c].append((("W", c), 0.0))
        for source, target in edges.forward:
            link = costs.link("F", source, target, placement)
            after["F", source].append((("F", target), link))
        for source, target in edges.backward:
            link = costs.link("B", source, target, placement)
            after[back, target].append(((back, source), link))
        return _Paths(tuple(order), {node: table[node[0]][node[1]] for node in order}, after)

    def heads(self) -> dict[Node, float]:
        """The longest path from the start to the start of each action."""
        head = dict.fromkeys(self.order, 0.0)
        for node in self.order:
            for user, link in self.after[node]:
                head[user] = max(head[user], head[node] + self.seconds[node] + link)
        return head

    def tails(self, costs: ChunkCosts) -> dict[Node, float]:
        """The longest path from the end of each action to the end of all, reductions included."""
        tail: dict[Node, float] = {}
        for node in reversed(self.order):
            final = costs.reduce[node[1]] if node[0] in ("B", "W") else 0.0
            tail[node] = max([final] + [link + self.seconds[user] + tail[user] for user, link in self.after[node]])
        return tail


def lower_bound(
    placement: Sequence[int],
    microbatches: int,
    costs: ChunkCosts,
    edges: Edges | None = None,
    *,
    split: bool | None = None,
) -> float:
    """The step time that no order of actions over this placement can beat.

    For any set of a stage's actions: the shortest way to the first of them, all their work, and the shortest way from
    the last to the end (the one-machine bound with heads and tails). One micro-batch alone gives the longest chain.
    ``split`` tells whether backwards are split; None takes the lesser of both bounds.
    """
    edges = costs.edges if edges is None else edges
    if split is None:
        return min(lower_bound(placement, microbatches, costs, edges, split=way) for way in (False, True))
    paths = _Paths.of(placement, costs, edges, split)
    heads, tails = paths.heads(), paths.tails(costs)
    best = max(heads[node] + paths.seconds[node] + tails[node] for node in paths.order)
    for stage in set(placement):
        mine = [(heads[n], paths.seconds[n], tails[n]) for n in paths.order if placement[n[1]] == stage]
        for head in {h for h, _, _ in mine}:
            for tail in {q for _, _, q in mine}:
                work = sum(time for h, time, q in mine if h >= head and q >= tail)
                if work:
                    best = max(best, head + microbatches * work + tail)
    return best
