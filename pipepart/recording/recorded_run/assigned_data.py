"""Assignments to ``Tensor.data`` of buffers and parameters: each is an op that changes the tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn as nn

from pipepart.recording.model_state.kept_parameters import keep
from pipepart.recording.recorded_run import intrinsics
from pipepart.recording.recorded_run.tensors import is_same_memory, storage_of

if TYPE_CHECKING:
    from pipepart.recording.recorded_run.recorder import Recorder

__all__ = ["set_data"]


def set_data(recorder: Recorder, tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Record that a tensor of the model gets other data; return False if it is another tensor, or gets another form."""
    if is_same_memory(tensor, value):
        return True  # `module.to(device)` where the module is there already
    name = recorder.tensor_names.get(id(tensor))
    form = (tensor.shape, tensor.dtype) == (value.shape, value.dtype)
    if name is None or not form:
        return False
    if isinstance(tensor, nn.Parameter):
        keep(tensor)
    nodes = (recorder.builder.node_of(tensor), recorder.builder.node_of(value))
    before = storage_of(tensor)
    with torch._C.DisableTorchFunction():
        tensor.data = value.detach().clone()
        node = recorder.builder.make("call_function", intrinsics.set_data, nodes, {})
        fact = recorder.facts[node]
        fact.mutates |= {before}
        fact.reads |= {before, storage_of(value)}
        recorder.mutations[before] = node
        recorder.builder.bind(tensor, node)
        fact.writes |= {before}
    fact.varies = True
    return True
