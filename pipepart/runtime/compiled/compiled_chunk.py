"""A chunk whose graph is compiled, called in the place of its graph."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from operator import attrgetter
from typing import Any

import torch

from pipepart.devices import usable_autocast
from pipepart.planning.compile_mode import CompileSettings
from pipepart.recording import Chunk
from pipepart.recording.execution.ops_run import RecordedGraph
from pipepart.recording.recorded_run.contexts import autocast_state, set_switches, switches
from pipepart.runtime.compiled.chunk_pieces import Apart, Piece, pieces_of
from pipepart.runtime.compiled.compiled_piece import CompiledPiece

__all__ = ["CompiledChunk", "NotCompiled"]


class NotCompiled(UserWarning):
    """A part of a chunk runs as it is, since it cannot be compiled."""


class CompiledChunk:
    """Runs the pieces of a chunk in order."""

    def __init__(self, chunk: Chunk, settings: CompileSettings, apart: Apart, halves: bool) -> None:
        self.graph: Any = chunk.module
        self._index, self._notes = chunk.index, set[str]()
        graph: Any = chunk.module
        assert isinstance(graph, RecordedGraph)
        self._takes = [node.name for node in graph.graph.find_nodes(op="placeholder")]
        results = next(iter(graph.graph.find_nodes(op="output"))).args[0]
        self._makes = [getattr(node, "name", None) for node in results]
        self._plain = [node if name is None else None for node, name in zip(results, self._makes)]
        self._attributes = {node.name: str(node.target) for node in results if getattr(node, "op", "") == "get_attr"}
        self._regions, self._on = graph._regions, True
        self._pieces: list[tuple[Piece, CompiledPiece | None]] = []
        for piece in pieces_of(graph, apart):
            made = CompiledPiece(piece, settings, halves, self._note) if piece.traced is not None else None
            self._pieces.append((piece, made))
        if not any(made for _, made in self._pieces):
            self._note("it has no ops that can be compiled")

    def begin(self, on: bool) -> None:
        """Read the state of the modules, before each step. Without `on`, the chunk runs as it is in this step."""
        self._on = on
        for _, made in self._pieces:
            if made is not None and on:
                made.begin()

    def __call__(self, *given: Any) -> tuple[Any, ...]:
        if not self._on:
            plain: tuple[Any, ...] = self.graph(*given)
            return plain
        if not self._regions:
            return self._run(given)
        with ExitStack() as stack:  # an exception inside a region must not leave its grad mode or autocast behind
            stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
            stack.callback(set_switches, switches())
            for kind in usable_autocast():
                stack.callback(torch.set_autocast_enabled, kind, torch.is_autocast_enabled(kind))
            return self._run(given)

    def _run(self, given: Sequence[Any]) -> tuple[Any, ...]:
        values = dict(zip(self._takes, given))
        surroundings = (
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast_state(), switches(),
        )  # fmt: skip
        for piece, compiled in self._pieces:
            arguments = [values[name] for name in piece.takes]
            results = compiled(arguments, surroundings) if compiled is not None else piece.graph.forward(*arguments)
            for name in piece.frees:
                if name not in self._makes:
                    values.pop(name, None)
            values.update(zip(piece.makes, results))
        values.update((name, attrgetter(path)(self.graph)) for name, path in self._attributes.items())
        return tuple(values[name] if name is not None else plain for name, plain in zip(self._makes, self._plain))

    def buffers(self) -> Iterator[torch.Tensor]:
        """Return the buffers of the chunk."""
        return self.graph.buffers()

    def _note(self, reason: str) -> None:
        if reason not in self._notes:
            self._notes.add(reason)
            warnings.warn(f"compile: a part of chunk {self._index} runs as it is: {reason}", NotCompiled, stacklevel=2)
