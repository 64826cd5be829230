"""Public result of `capture`: the recordings in train and eval mode, and the graph that planning reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch.nn as nn

from pipepart.errors import CaptureError
from pipepart.graph.opgraph import OpGraph, op_graph
from pipepart.recording.inputs import trees
from pipepart.recording.inputs.batching import Batching
from pipepart.recording.record import record
from pipepart.recording.recorded import Recording
from pipepart.recording.step import step_recorder
from pipepart.samples.pieces import other_batches

__all__ = ["Captured", "capture"]


class CapturedModule(nn.Module):
    """Module over the parameters of the original that runs the graph of the current mode, train or eval."""

    _train: Any
    _eval: Any
    _root: Any

    def __init__(self, captured: Captured):
        super().__init__()
        self.__dict__["_train"] = captured.train.module()
        self.__dict__["_eval"] = captured.eval.module() if captured.eval is not None else None
        self.__dict__["_root"] = captured.train.root
        self.training = captured.train.root.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._root.training:
            return self._train(*args, **kwargs)
        if self._eval is None:
            raise CaptureError(
                f"{type(self._root).__name__} is in eval mode, but its training step was captured in train mode only. "
                "Call train() first, or capture the module or another step of it."
            )
        return self._eval(*args, **kwargs)

    def train(self, mode: bool = True) -> CapturedModule:
        self._root.train(mode)
        self.training = mode
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self._root.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return self._root.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._root.state_dict(*args, **kwargs)


@dataclass(frozen=True, eq=False)
class Captured:
    """Captured model. `train` and `eval` share the user's parameters; `graph` describes the train recording."""

    train: Recording
    eval: Recording | None
    graph: OpGraph

    @cached_property
    def module(self) -> nn.Module:
        """Module that is called like the original and follows ``train()`` and ``eval()``."""
        return CapturedModule(self)

    @property
    def hash(self) -> str:
        """Hash of the train recording, the same in all processes and on all machines."""
        return self.graph.hash

    def __str__(self) -> str:
        graph = self.graph
        total = sum(p.numel() for p in self.train.root.parameters())
        lines = [
            f"{type(self.train.root).__name__}: {len(graph)} ops, {total:,} parameters, "
            f"{sum(op.flops for op in graph.ops):,} FLOPs forward, hash {self.hash[:12]}"
        ]
        lines += [f"  note: {note}" for note in self.train.notes]
        if self.eval is not None:
            lines += [f"  note, in eval mode: {note}" for note in self.eval.notes if note not in self.train.notes]
        lines.append(f"  {'op':28} {'module':32} {'class':18} {'shape':20} {'params':>10} {'MFLOPs':>9}  source")
        for op in graph.ops:
            if op.kind in ("number", "output"):
                continue
            shape = "x".join(map(str, op.shape)) if op.shape is not None else "-"
            lines.append(
                f"  {op.name[:28]:28} {op.module[-32:]:32} {op.module_class[:18]:18} {shape[:20]:20} "
                f"{op.parameter_bytes:>10,} {op.flops / 1e6:>9.2f}  {op.source}"
            )
        return "\n".join(lines)


def capture(
    module_or_step: nn.Module | Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> Captured:
    """Capture a module, or a bound method of one (``model.training_step``), on an example, in train and in eval mode.

    For a step of a LightningModule, `args` is ``(batch,)`` or ``(batch, batch_idx)``. A training step is captured in
    train mode and other steps in eval mode, as Lightning runs them.
    """
    owner = getattr(module_or_step, "__self__", None)
    name = getattr(module_or_step, "__name__", "")
    recorder = step_recorder(owner, name) if isinstance(owner, nn.Module) else None
    if isinstance(owner, nn.Module) and recorder is not None:
        index = int(args[1]) if len(args) > 1 else int((kwargs or {}).get("batch_idx", 0))
        others = other_batches(args[0], owner, False)
        batching = _in_pieces(args[0], others)
        recording = _in_mode(
            owner,
            name == "training_step",
            lambda: recorder(owner, name, args[0], batch_idx=index, batching=batching, others=others or ()),
        )
        return Captured(recording, recording if name != "training_step" else None, op_graph(recording))
    root = module_or_step if isinstance(module_or_step, nn.Module) else owner
    if not isinstance(root, nn.Module):
        raise CaptureError(f"capture({module_or_step!r}): expected a module or a bound method of a module")
    given = (tuple(args), dict(kwargs or {}))
    others = other_batches(given, root, True)
    made = partial(record, module_or_step, *given, batching=_in_pieces(given, others), others=others or ())
    train = _in_mode(root, True, made)
    evaluation = _in_mode(root, False, partial(made, like=train))
    return Captured(train, evaluation, op_graph(train))


def _in_pieces(batch: Any, others: list[Any] | None) -> Batching | None:
    """Return the batching of a batch that is split as a container; None if it is split along a dimension."""
    leaves = len(trees.leaves_of(batch))
    return Batching((None,) * leaves, 0) if others else None


def _in_mode(root: nn.Module, training: bool, function: Callable[[], Recording]) -> Recording:
    """Run `function` with the module in train or eval mode; each submodule gets its own mode back."""
    modes = [(module, module.training) for module in root.modules()]
    if training != root.training:
        root.train(training)
    try:
        return function()
    finally:
        for module, mode in modes:
            module.training = mode
