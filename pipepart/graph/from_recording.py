"""From a recording to its `OpGraph`."""

from __future__ import annotations

import torch.fx as fx

from pipepart.graph.opgraph import Op, OpGraph
from pipepart.recording.execution.colocate import colocated
from pipepart.recording.execution.ops_run import used_tensors
from pipepart.recording.fingerprint import target_name
from pipepart.recording.model_state.state import tensor_names
from pipepart.recording.recording import OpMeta, Recording

__all__ = ["op_graph"]

_KINDS = {"placeholder": "input", "call_module": "module", "call_function": "function", "call_method": "method"}


def op_graph(recording: Recording) -> OpGraph:
    """The ops of a recording in program order; reads of parameters and buffers are folded into their users."""
    nodes = recording.ops
    position = {node: i for i, node in enumerate(nodes)}
    sizes = {name: p.numel() * p.element_size() for name, p in recording.root.named_parameters()}
    names = tensor_names(recording.root)
    ops = tuple(_op(recording, node, sizes, names) for node in nodes)
    edges = tuple(
        (position[source], i) for i, node in enumerate(nodes) for source in node.all_input_nodes if source in position
    )
    groups = tuple(tuple(position[node] for node in group) for group in colocated(recording))
    return OpGraph(ops, edges, groups, recording.hash)


def _op(recording: Recording, node: fx.Node, sizes: dict[str, int], names: dict[int, str]) -> Op:
    if node.op == "output":
        return Op(node.name, "output", "output", "", "", "", None, None, 0, False, (), 0, 0, False, False, False)
    meta: OpMeta = node.meta["op"]
    used = tuple(name for name in used_tensors(recording, [node], names) if name in sizes)
    number = meta.is_number and node.op != "placeholder"
    return Op(
        name=node.name,
        kind="number" if number else _KINDS[node.op],
        target=target_name(node.target),
        module=meta.module,
        module_class=meta.module_class,
        source=meta.source,
        shape=meta.shape,
        dtype=meta.dtype,
        output_bytes=meta.nbytes,
        requires_grad=meta.requires_grad,
        parameters=used,
        parameter_bytes=sum(sizes[name] for name in used),
        flops=node.meta.get("flops", 0),
        random=meta.random,
        dynamic_shape=meta.dynamic_shape,
        replicable=meta.replicable,
    )
