"""The compiled chunks of one stage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from pipepart.options import Options
from pipepart.planning.compile_mode import CompileSettings
from pipepart.recording import Chunk
from pipepart.recording.recorded_run import intrinsics
from pipepart.runtime.compiled.chunk_pieces import Apart, is_watched
from pipepart.runtime.compiled.compiled_chunk import CompiledChunk
from pipepart.runtime.compiled.inductor import check_settings
from pipepart.runtime.randomness import RandomState, recomputing

__all__ = ["CompiledStage", "compiled_chunks"]

_WITH_EFFECTS = (intrinsics.method_of, intrinsics.set_attribute, intrinsics.set_data)


class CompiledStage:
    """The chunks of a stage with compiled graphs."""

    def __init__(self, chunks: Sequence[Chunk], settings: CompileSettings, options: Options, halves: bool) -> None:
        layers: tuple[type, ...] = (_BatchNorm,) if options.batch_norm == "batch" else ()
        self._plain = tuple(chunks)
        self._made: list[CompiledChunk] = []
        self._begun = False
        self.chunks: dict[int, Chunk] = {}
        """The chunks by index."""
        for chunk in chunks:
            numbers = [edge.name for edge in chunk.imports if edge.kind == "number"]
            made: Any = CompiledChunk(chunk, settings, Apart(numbers, options.randomness == "stage", layers), halves)
            self._made.append(made)
            self.chunks[chunk.index] = replace(chunk, module=made)

    def begin(self, on: bool) -> None:
        """Read the state of the modules, before each step. Without `on`, chunks run as they are in this step."""
        for made in self._made:
            made.begin(on)

    def compile_at_once(
        self, recompute: Collection[int], context: Callable[[], AbstractContextManager[Any]], device: torch.device
    ) -> None:
        """Compile all chunks before the first training step, so that no stage waits until the ones before it have compiled.

        Each chunk runs its forward once on zeros. A chunk that has effects, or that zeros do not fit, is compiled when its
        first micro-batch comes.
        """
        if self._begun:
            return
        self._begun = True
        for chunk, made in zip(self._plain, self._made):
            if chunk.index == 0 or _has_effects(chunk) or any(edge.shape is None for edge in _tensors(chunk)):
                continue
            given = [_zeros(chunk, edge, device) if edge.kind != "number" else 1.0 for edge in chunk.imports]
            for gradients in (False, True) if chunk.index in recompute else (True,):
                with suppress(Exception), recomputing(made, RandomState(device), device):  # type: ignore[arg-type]
                    with torch.set_grad_enabled(gradients), context():
                        made(*given)


def _tensors(chunk: Chunk) -> list[Any]:
    return [edge for edge in chunk.imports if edge.kind != "number"]


def _zeros(chunk: Chunk, edge: Any, device: torch.device) -> torch.Tensor:
    value = torch.zeros(edge.shape, dtype=edge.dtype, device=device)
    return value.requires_grad_(chunk.index in edge.grad_targets)


def _has_effects(chunk: Chunk) -> bool:
    modules = [chunk.module.__dict__[str(n.target)] for n in chunk.module.graph.nodes if n.op == "call_module"]
    watched = any(
        is_watched(part) for module in modules if isinstance(module, torch.nn.Module) for part in module.modules()
    )
    return watched or any(node.target in _WITH_EFFECTS for node in chunk.module.graph.nodes)


def compiled_chunks(chunks: Sequence[Chunk], options: Options, halves: bool) -> CompiledStage | None:
    """Return the chunks of a stage with compiled graphs; None if the options want none.

    With `halves`, the schedule divides backward into two halves.
    """
    settings = options.compile_settings
    if settings is None:
        return None
    check_settings(settings)
    return CompiledStage(chunks, settings, options, halves)
