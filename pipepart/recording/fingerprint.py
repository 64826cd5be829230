"""Text of a recorded graph, the same in every process: the base of its hash and of the comparison of two runs."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx

from pipepart.recording.op import op_of
from pipepart.recording.recorded_run.intrinsics import check

if TYPE_CHECKING:
    from pipepart.recording.recorded import Recording

__all__ = ["describe", "structure", "target_name"]


def target_name(target: Any) -> str:
    """Return the name of the target of a node, without memory addresses."""
    if isinstance(target, str):
        return target
    name = getattr(target, "stable_name", None)
    if name is None:
        module = getattr(target, "__module__", None) or ""
        name = f"{module}.{getattr(target, '__qualname__', getattr(target, '__name__', type(target).__name__))}"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(name))


def structure(value: Any, node_text: Callable[[fx.Node], str]) -> str:
    """Return arguments of a node as text; `node_text` names the nodes among them."""
    if isinstance(value, fx.Node):
        return node_text(value)
    if isinstance(value, (tuple, list)):
        inner = ",".join(structure(item, node_text) for item in value)
        return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{structure(item, node_text)}" for key, item in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice({structure((value.start, value.stop, value.step), node_text)})"
    if isinstance(value, torch.device):
        return "device"
    if isinstance(value, enum.Enum) or value is None or isinstance(value, (bool, int, float, complex, str)):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)) or value is Ellipsis:
        return str(value)
    return target_name(value if callable(value) else type(value))


def describe(recording: Recording) -> str:
    """Return everything that determines the results of a recording, except the values of parameters, as text."""
    index = {node: i for i, node in enumerate(recording.graph.nodes)}
    lines = [f"training={recording.training} step={recording.step} loss={recording.loss_index}"]
    lines += [
        f"in {spec.kind} {spec.dtype} {spec.value if spec.kind == 'constant' else ''}" for spec in recording.inputs
    ]
    for node in recording.graph.nodes:
        args = node.args[:2] if node.target is check else node.args  # the rest is the place, for error messages
        text = structure((args, dict(node.kwargs)), lambda other: f"%{index[other]}")
        target = "" if node.op in ("placeholder", "output") else target_name(node.target)
        regions = op_of(node).checkpoint
        lines.append(f"{node.op} {target} {text}{f' checkpoint {regions}' if regions else ''}")
    for name, value in recording.constants.items():
        kind = f"{value.dtype}{tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        lines.append(f"constant {name} {kind}")
    for name, parameter in recording.root.named_parameters():
        lines.append(f"parameter {name} {tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}")
    for extra in recording.extras:
        lines.append(f"log {extra.name} {extra.output} {sorted(extra.about)}")  # "log": hashes in plan files stay valid
    return "\n".join(lines)
