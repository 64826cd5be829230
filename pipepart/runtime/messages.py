"""What goes over the wire between two chunks: which values, in which shapes, and how the receiver knows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from pipepart.errors import PipelineError
from pipepart.recording import BATCH, Chunk, Edge

__all__ = ["Routes", "TensorSpec", "ValueSpec", "decode_announcement", "encode_announcement", "spec_of"]


@dataclass(frozen=True)
class TensorSpec:
    shape: tuple[int, ...]
    dtype: torch.dtype


ValueSpec = TensorSpec | str
"""A tensor's form, or the type name of a plain number ("int", "float", "bool")."""


@dataclass(frozen=True)
class Routes:
    """For each pair of chunks, the values that go forward and the ones whose gradients come back.

    Leaves of the batch enter the pipeline with chunk 0, so they travel in the messages of chunk 0.
    """

    forward: Mapping[tuple[int, int], tuple[Edge, ...]]
    """(source chunk, target chunk) -> the edges in the order of the message."""
    placement: tuple[int, ...]

    @staticmethod
    def of(chunks: Sequence[Chunk], placement: Sequence[int]) -> Routes:
        table: dict[tuple[int, int], list[Edge]] = {}
        for chunk in chunks:
            for edge in chunk.imports:
                # Plain numbers of the batch (step counters) are known on every rank from the step header.
                if edge.source == BATCH and (chunk.index == 0 or edge.kind == "number"):
                    continue
                table.setdefault((max(edge.source, 0), chunk.index), []).append(edge)
        return Routes({pair: tuple(edges) for pair, edges in sorted(table.items())}, tuple(placement))

    @property
    def forward_pairs(self) -> frozenset[tuple[int, int]]:
        return frozenset(self.forward)

    @property
    def backward_pairs(self) -> frozenset[tuple[int, int]]:
        """(source chunk, target chunk) of the forward edges over which a gradient comes back."""
        return frozenset(pair for pair in self.forward if self.gradients(pair))

    def gradients(self, pair: tuple[int, int]) -> tuple[Edge, ...]:
        """The edges of a pair whose gradients are sent back from the target to the source."""
        return self._gradients[pair]

    def leaving(self, chunk: int) -> tuple[tuple[int, int], ...]:
        return self._leaving.get(chunk, ())

    def entering(self, chunk: int) -> tuple[tuple[int, int], ...]:
        return self._entering.get(chunk, ())

    # Asked for with every action, so worked out once.

    @cached_property
    def _gradients(self) -> dict[tuple[int, int], tuple[Edge, ...]]:
        return {
            pair: tuple(edge for edge in edges if pair[1] in edge.grad_targets and edge.source != BATCH)
            for pair, edges in self.forward.items()
        }

    @cached_property
    def _leaving(self) -> dict[int, tuple[tuple[int, int], ...]]:
        return {chunk: tuple(pair for pair in self.forward if pair[0] == chunk) for chunk, _ in self.forward}

    @cached_property
    def _entering(self) -> dict[int, tuple[tuple[int, int], ...]]:
        return {chunk: tuple(pair for pair in self.forward if pair[1] == chunk) for _, chunk in self.forward}

    def local(self, pair: tuple[int, int]) -> bool:
        """Both chunks live on the same stage: values are handed over, not sent."""
        return self.placement[pair[0]] == self.placement[pair[1]]


def spec_of(value: Any, edge: Edge) -> ValueSpec:
    if isinstance(value, torch.Tensor):
        return TensorSpec(tuple(value.shape), value.dtype)
    if isinstance(value, (bool, int, float)):
        return type(value).__name__
    raise PipelineError(
        f"the value of {edge.name!r} crosses from chunk {edge.source} to {list(edge.targets)} and is a "
        f"{type(value).__name__}; only tensors and numbers can. Keep its producer and its users in one chunk (keep_together)."
    )


def encode_announcement(specs: Sequence[ValueSpec]) -> tuple[torch.Tensor, torch.Tensor]:
    """The forms of the values of a message as (length, bytes), sent once for each new form of the micro-batch."""
    plain = [(list(s.shape), str(s.dtype).removeprefix("torch.")) if isinstance(s, TensorSpec) else s for s in specs]
    data = bytearray(json.dumps(plain).encode())
    return torch.tensor([len(data)], dtype=torch.int64), torch.frombuffer(data, dtype=torch.uint8)


def decode_announcement(data: torch.Tensor) -> tuple[ValueSpec, ...]:
    plain = json.loads(data.cpu().numpy().tobytes())
    return tuple(s if isinstance(s, str) else TensorSpec(tuple(s[0]), getattr(torch, s[1])) for s in plain)
