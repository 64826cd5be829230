"""Ops of a step that acts: the parameters and buffers that they use and change, and the gradients that they need."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx as fx
from torch.nn.modules.batchnorm import _BatchNorm

from pipepart.recording.execution.ops_run import resolve, used_tensors
from pipepart.recording.model_state import state
from pipepart.recording.op import op_of
from pipepart.recording.recorded import Recording
from pipepart.recording.recorded_run import intrinsics

__all__ = ["FIXED", "Act", "ActingOps"]

FIXED = ("placeholder", "get_attr", "output")
"""The kinds of nodes that are not computed."""


@dataclass(frozen=True)
class Act:
    """An act of a step: a backward from an output of the recording, or a change of parameters, or neither."""

    loss: int | None = None
    """The flat output of the recording from which the backward starts; None: no backward."""
    changes: frozenset[str] = frozenset()
    """The parameters that the act changes."""
    text: str = ""


class ActingOps:
    """The ops of one recorded step."""

    def __init__(
        self,
        recording: Recording,
        acts: Sequence[Act],
        frozen: Sequence[Collection[str]],
    ) -> None:
        self.recording, self.acts, self.frozen = recording, acts, frozen
        self.nodes: list[fx.Node] = list(recording.graph.nodes)
        self.position = {node: i for i, node in enumerate(self.nodes)}
        results: Any = self.nodes[-1].args[0]
        self.outputs: list[Any] = list(results)
        canonical = state.tensor_names(recording.root)
        parameters = dict(recording.root.named_parameters())
        self.trainable = {name for name, parameter in parameters.items() if parameter.requires_grad}
        self.parameters: dict[fx.Node, frozenset[str]] = {}
        self.buffers: dict[fx.Node, frozenset[str]] = {}
        for node in self.nodes:
            used = () if node.op in FIXED else used_tensors(recording, [node], canonical)
            self.parameters[node] = frozenset(name for name in used if name in parameters)
            self.buffers[node] = frozenset(name for name in used if name not in parameters)
        self.attributes = {node: name for node in self.nodes if (name := self._read(node, canonical)) is not None}
        self.writes = {node: names for node in self.nodes if (names := self._written(node))}
        self.written = frozenset().union(*self.writes.values()) if self.writes else frozenset()
        self.requires: set[fx.Node] = set()
        for node in self.nodes:
            if self._requires_gradient(node):
                self.requires.add(node)

    def _read(self, node: fx.Node, canonical: Mapping[int, str]) -> str | None:
        """Return the name of the parameter or buffer that a node reads."""
        path = str(node.target)
        if node.op != "get_attr" or path in self.recording.constants:
            return None
        return canonical.get(id(resolve(self.recording.root, path)))

    def _written(self, node: fx.Node) -> frozenset[str]:
        """Return the buffers that an op changes."""
        if node.op in FIXED:
            return frozenset()
        if node.op == "call_module" and op_of(node).stateful:
            return self.buffers[node] or frozenset([str(node.target)])
        if node.target in (intrinsics.set_attribute, intrinsics.method_of):
            return frozenset([f"{node.args[0]}.{node.args[1]}"])
        changed = op_of(node).mutates
        if not changed:
            return frozenset()
        return frozenset(name for read, name in self.attributes.items() if op_of(read).writes & changed)

    def is_norm(self, node: fx.Node) -> bool:
        """Return whether an op is a BatchNorm that normalises by its batch: what it has written before does not matter."""
        if node.op == "call_module":
            module = resolve(self.recording.root, str(node.target))
            return isinstance(module, _BatchNorm) and module.training
        return getattr(node.target, "__name__", "") in ("batch_norm", "native_batch_norm") and bool(op_of(node).mutates)

    def _requires_gradient(self, node: fx.Node) -> bool:
        """Return whether a value requires a gradient, with the parameters frozen that the step has frozen there."""
        if node.op == "get_attr":
            return False
        op = op_of(node)
        if node.op in FIXED or not op.requires_grad:
            return False
        free = self.trainable - set(self.frozen[op.moment])
        if node.op == "call_module" and self.parameters[node] & free:
            return True
        return any(s in self.requires or self.attributes.get(s) in free for s in op.differentiates)

    def changed(self, names: Collection[str], one: int, other: int) -> str:
        """Return the act between two moments that changes one of these parameters; empty if none does."""
        for act in self.acts[min(one, other) : max(one, other)]:
            if not act.changes.isdisjoint(names):
                return act.text
        return ""
