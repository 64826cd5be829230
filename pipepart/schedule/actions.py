"""Actions, messages, the schedule as lists of actions, and the edges along which chunks exchange data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from pipepart.errors import ScheduleError

__all__ = ["COMPUTE", "MESSAGES", "Action", "Edges", "Message", "Schedule", "looped_placement", "v_placement"]

COMPUTE = ("F", "B", "I", "W")
"""Kinds of actions that occupy a device: forward, full backward, and its two halves (input and weight gradient)."""
MESSAGES = ("SEND", "RECV")
"""Kinds of actions that exchange a message."""


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a stage's program, for one chunk and one micro-batch."""

    kind: str
    """``F`` ``B`` ``I`` ``W`` compute; ``SEND`` ``RECV`` communicate; ``REDUCE`` sums gradients (replicas, ties)."""
    chunk: int
    microbatch: int
    peer: int | None = None
    """SEND and RECV: the chunk at the other end."""
    payload: str | None = None
    """SEND and RECV: ``F`` an activation, ``B`` a gradient."""

    @property
    def message(self) -> Message:
        """The message of a SEND or RECV: equal for its two ends."""
        assert self.payload is not None
        assert self.peer is not None
        source, target = (self.chunk, self.peer) if self.kind == "SEND" else (self.peer, self.chunk)
        return Message(self.payload, source, target, self.microbatch)

    def __str__(self) -> str:
        if self.kind in MESSAGES:
            ends = f"{self.chunk}>{self.peer}" if self.kind == "SEND" else f"{self.peer}>{self.chunk}"
            return f"{self.kind} {self.payload} {ends} .{self.microbatch}"
        if self.kind == "REDUCE":
            return f"REDUCE {self.chunk}"
        return f"{self.kind}{self.chunk}.{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Message:
    """Tensors on their way: ``source`` is the chunk that sends them, ``target`` the chunk that receives them.

    The gradient for an activation sent from chunk 0 to chunk 1 is ``Message("B", 1, 0, k)``.
    """

    payload: str
    source: int
    target: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.payload} {self.source}>{self.target} .{self.microbatch}"

    @property
    def send(self) -> Action:
        """The action of the sender."""
        return Action("SEND", self.source, self.microbatch, self.target, self.payload)

    @property
    def recv(self) -> Action:
        """The action of the receiver."""
        return Action("RECV", self.target, self.microbatch, self.source, self.payload)


@dataclass(frozen=True)
class Edges:
    """The chunks that exchange data, as pairs (earlier chunk, later chunk).

    Activations go along ``forward``; gradients come back along ``backward``, a subset of it (an edge that carries
    only integers, or whose source needs no gradient, has none). Pairs that pass over chunks are skips. ``tied``
    names groups of chunks that share a parameter, whose gradients are summed when the last of them is final.
    """

    forward: frozenset[tuple[int, int]]
    backward: frozenset[tuple[int, int]]
    tied: tuple[tuple[int, ...], ...] = ()

    @staticmethod
    def chain(chunks: int) -> Edges:
        """The edges of a plain sequence: each chunk feeds the next."""
        pairs = frozenset((c, c + 1) for c in range(chunks - 1))
        return Edges(pairs, pairs)

    @staticmethod
    def of(
        chunks: int,
        forward: Iterable[tuple[int, int]] | None = None,
        backward: Iterable[tuple[int, int]] | None = None,
        tied: Iterable[Iterable[int]] = (),
    ) -> Edges:
        """Edges after a check: ``forward`` defaults to the chain, ``backward`` to ``forward``."""
        forward_set = Edges.chain(chunks).forward if forward is None else frozenset(forward)
        backward_set = forward_set if backward is None else frozenset(backward)
        groups = tuple(tuple(sorted(set(group))) for group in tied)
        for source, target in sorted(forward_set | backward_set):
            if not 0 <= source < target < chunks:
                raise ScheduleError(
                    f"edge {source}>{target}: expected (earlier chunk, later chunk) with chunks 0..{chunks - 1}; "
                    "data can only go forward through the chunks, and gradients are named by the same pair"
                )
        if loose := sorted(backward_set - forward_set):
            named = ", ".join(f"{a}>{b}" for a, b in loose)
            raise ScheduleError(f"gradient edges {named}: no activation goes that way, so no gradient can come back")
        for group in groups:
            if any(not 0 <= chunk < chunks for chunk in group):
                raise ScheduleError(f"tied chunks {group}: expected chunks 0..{chunks - 1}")
        return Edges(forward_set, backward_set, groups)


@dataclass(frozen=True)
class Schedule:
    """The compute actions of every stage, in order. The messages follow from them (see `messages_of`)."""

    name: str
    stages: int
    microbatches: int
    placement: tuple[int, ...]
    """The stage of each chunk."""
    actions: tuple[tuple[Action, ...], ...] = field(repr=False)
    """Compute actions of each stage (``F``, and ``B`` or ``I`` and ``W``), in order."""

    @property
    def chunks(self) -> int:
        """Number of all chunks."""
        return len(self.placement)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether some backward is split into ``I`` and ``W``."""
        return any(action.kind == "I" for actions in self.actions for action in actions)

    @cached_property
    def forward_only(self) -> bool:
        """Whether there is no backward at all."""
        return all(action.kind == "F" for actions in self.actions for action in actions)

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """The chunks that a stage holds, in order."""
        return tuple(chunk for chunk, home in enumerate(self.placement) if home == stage)

    def __str__(self) -> str:
        most = max(Counter(self.placement).values(), default=0)
        chunks = f", {most} chunks each" if most > 1 else ""
        return f"{self.name}: {self.stages} stages{chunks}, {self.microbatches} micro-batches"


def looped_placement(stages: int, chunks: int) -> tuple[int, ...]:
    """Chunk c on stage c mod p: ``0 1 2 3 0 1 2 3``."""
    return tuple(c % stages for c in range(stages * chunks))


def v_placement(stages: int, chunks: int = 2) -> tuple[int, ...]:
    """Chunks down and up again: ``0 1 2 3 3 2 1 0``, so that neighbours at the turns need no link."""
    down = tuple(range(stages))
    return tuple(stage for turn in range(chunks) for stage in (down if turn % 2 == 0 else down[::-1]))
