"""Tensors that a step keeps as attributes of modules (a cache of positions, statistics of an input).

The stage that runs the op has them. Before the step is recorded again, all stages of a replica get them: a step that reads an
attribute would otherwise be another one on the other stages.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipepart.recording.inputs import trees
from pipepart.recording.recorded_run.intrinsics import set_attribute
from pipepart.runtime.chunked_step import ChunkedStep
from pipepart.runtime.failure import guarded
from pipepart.runtime.meeting import gather_objects
from pipepart.runtime.mesh import Groups

__all__ = ["KeptAttributes"]


class KeptAttributes:
    """The attributes that the steps of one stage set, as module path and name."""

    def __init__(self, root: nn.Module, groups: Groups | None, device: torch.device) -> None:
        self._root, self._groups, self._device = root, groups, device
        self._any = False
        self._own: dict[tuple[str, str], None] = {}

    def add(self, step: ChunkedStep, chunks: set[int]) -> None:
        """Note the attributes that a step sets in these chunks, which are those of this stage."""
        nodes = {n.name: n for n in step.weighed.recording.graph.nodes if n.target is set_attribute}
        self._any |= bool(nodes)
        for chunk in step.chunks:
            names = (node.meta.get("origin") for node in chunk.module.graph.nodes if node.target is set_attribute)
            for node in (nodes[name] for name in names if name in nodes and chunk.index in chunks):
                self._own[str(node.args[0].target), str(node.args[1])] = None

    def share(self) -> None:
        """Give every stage of the replica the values of the stages that set them. All of them must call it."""
        if self._groups is None or not self._any:  # recordings are equal on all ranks
            return
        own = {}
        for path, name in self._own:
            module = self._root.get_submodule(path)
            if name not in module._buffers and hasattr(module, name):
                own[path, name] = trees.map_structure(_to_host, getattr(module, name))
        with guarded(self._groups):
            found: list[dict[tuple[str, str], Any]] = gather_objects(own, self._groups, inside_replica=True)
        for stage, values in enumerate(found):
            for (path, name), value in values.items() if stage != self._groups.stage else ():
                setattr(self._root.get_submodule(path), name, trees.moved(value, self._device))


def _to_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
