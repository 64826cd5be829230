"""Runnable graphs that read all parameters, buffers and flags from the user's own modules.

Nothing is copied or registered: a runnable graph holds plain references to the leaf modules that it calls and to the
modules whose parameters, buffers and ``training`` flags it reads. So a replaced parameter (moved, materialised) and a call
of ``root.eval()`` take effect at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx
import torch.nn as nn

from pipepart.devices import usable_autocast
from pipepart.recording.model_state.state import tensor_names
from pipepart.recording.recorded_run.contexts import set_switches, switches
from pipepart.recording.recorded_run.intrinsics import set_attribute

if TYPE_CHECKING:
    from pipepart.recording.recorded import Recording

__all__ = ["RecordedGraph", "RecordedModule", "resolve", "used_tensors"]


class RecordedGraph(fx.GraphModule):
    """A runnable part of a recording with the parameters of the root, under their full names.

    Its Python code is generated when it is first called or read: many parts are made and never run.
    """

    _root: Any
    _used: Any
    _regions: bool
    _compiled: bool

    def __init__(
        self, root: nn.Module, graph: fx.Graph, references: Mapping[str, Any], used: Sequence[str], regions: bool
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            super().__init__(nn.Module(), fx.Graph(), type(root).__name__)
        self.__dict__["_root"] = root
        self.__dict__["_used"] = tuple(used)
        self.__dict__["_regions"] = regions
        self.__dict__.update(references)
        self.training = root.training
        self.graph = graph

    def __call__(self, *args: Any) -> Any:
        if not self._regions:
            return self.forward(*args)
        with ExitStack() as stack:  # an exception inside a region must not leave its grad mode or autocast behind
            stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
            stack.callback(set_switches, switches())
            for kind in usable_autocast():
                stack.callback(torch.set_autocast_enabled, kind, torch.is_autocast_enabled(kind))
            return self.forward(*args)

    def recompile(self) -> Any:
        """Discard the code after a change of the graph."""
        kind: Any = type(self)  # fx makes a class for each instance
        kind.forward = RecordedGraph._compiled_forward
        self.__dict__["_compiled"] = False

    def _compiled_forward(self, *args: Any) -> Any:
        self._compile()
        return self.forward(*args)

    def _compile(self) -> None:
        if not self._compiled:
            super().recompile()
            self.__dict__["_compiled"] = True

    @property
    def code(self) -> str:
        self._compile()
        return super().code

    def __str__(self) -> str:
        self._compile()
        return super().__str__()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        return self._own(self._root.named_parameters(prefix, remove_duplicate=remove_duplicate), prefix)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        return self._own(self._root.named_buffers(prefix, remove_duplicate=remove_duplicate), prefix)

    def _own(self, named: Iterator[tuple[str, Any]], prefix: str) -> Iterator[tuple[str, Any]]:
        names = {f"{prefix}.{name}" if prefix else name for name in self._used}
        return (item for item in named if item[0] in names)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the part of the root's state that this graph uses, under full names."""
        return {name: value for name, value in self._root.state_dict().items() if name in self._used}

    def train(self, mode: bool = True) -> RecordedGraph:
        """Switch the mode of the root: a recording has no mode of its own."""
        self._root.train(mode)
        self.training = mode
        return self


class RecordedModule(nn.Module):
    """A recording that is called like the original module or step."""

    recording: Any
    body: Any

    def __init__(self, recording: Recording, body: RecordedGraph):
        super().__init__()
        self.__dict__.update(recording=recording, body=body)  # not as submodules
        self.training = recording.root.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.recording.unflatten(self.body(*self.recording.flatten(args, kwargs)))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.recording.root.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return self.recording.root.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.recording.root.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.recording.root.load_state_dict(*args, **kwargs)

    def train(self, mode: bool = True) -> RecordedModule:
        self.recording.root.train(mode)
        self.training = mode
        return self


def used_tensors(
    recording: Recording, nodes: Sequence[fx.Node], canonical: Mapping[int, str] | None = None
) -> list[str]:
    """Return the first full names of the parameters and buffers that these nodes use, in the order of the root."""
    root = recording.root
    canonical = canonical if canonical is not None else tensor_names(root)
    found: dict[str, None] = {}
    for node in nodes:
        sources = [node] if node.op == "call_module" else []
        sources += [source for source in node.all_input_nodes if source.op == "get_attr"]
        for source in sources:
            path = str(source.target)
            if path in recording.constants:
                continue
            value = resolve(root, path)
            if node.target is set_attribute and isinstance(value, nn.Module):
                continue
            tensors = [value] if isinstance(value, torch.Tensor) else []
            if isinstance(value, nn.Module):
                tensors = [*value.parameters(), *value.buffers()]
            for tensor in tensors:
                name = canonical.get(id(tensor))
                if name is not None:
                    found[name] = None
    if len(found) < 2:
        return list(found)
    order = {name: i for i, name in enumerate(canonical.values())}
    return sorted(found, key=order.__getitem__)


def resolve(root: nn.Module, path: str) -> Any:
    """Return the attribute of the root with this dotted name."""
    value: Any = root
    for part in path.split(".") if path else []:
        value = getattr(value, part)
    return value
