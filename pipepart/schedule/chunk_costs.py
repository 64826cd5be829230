"""What the actions of a schedule cost: the input of the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipepart.errors import ScheduleError
from pipepart.schedule.actions import Edges

__all__ = ["ChunkCosts"]

Pair = tuple[int, int]

_PER_CHUNK = (
    "forward", "backward_input", "backward_weight", "backward", "recompute", "activation", "reduce",
    "handling_forward", "handling_backward",
)  # fmt: skip


@dataclass(frozen=True)
class ChunkCosts:
    """Seconds per chunk for one micro-batch, seconds per edge, and what an activation weighs.

    A full backward takes ``backward_input + backward_weight`` unless ``backward`` says otherwise (splitting it can
    cost something). An edge is the pair (earlier chunk, later chunk), for gradients too. Edges between chunks on the
    same stage are free, whatever is said here.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    backward: tuple[float, ...] = ()
    recompute: tuple[float, ...] = ()
    """Added to the backward (``B`` or ``I``) of each chunk: the forward that is run again."""
    activation: tuple[float, ...] = ()
    """What one micro-batch keeps on the device for each chunk, from its ``F`` to the end of its ``B`` or ``W``."""
    kept_for_weight: float = 1.0
    """The part of an activation that stays between ``I`` and ``W``."""
    send_forward: Mapping[Pair, float] = field(default_factory=dict)
    send_backward: Mapping[Pair, float] = field(default_factory=dict)
    handling_forward: tuple[float, ...] = ()
    """For which each ``F`` keeps its device from other work besides: receiving, sending, starting it."""
    handling_backward: tuple[float, ...] = ()
    """The same for each ``B`` or ``I``."""
    contention: bool = False
    """Whether a stage sends one message at a time and receives one at a time, instead of any number at once."""
    reduce: tuple[float, ...] = ()
    """Replicas: summing the gradients of each chunk, from when they are final, one after the other per stage."""
    reduce_tied: tuple[float, ...] = ()
    """Summing the gradients of each group in `Edges.tied`, from when all its stages have done all else."""

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

    def handling(self) -> Mapping[str, Sequence[float]]:
        """Seconds that come before each compute action on its device: kind, then chunk."""
        back = self.handling_backward
        return {"F": self.handling_forward, "B": back, "I": back, "W": (0.0,) * self.chunks}
