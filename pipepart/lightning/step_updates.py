"""Updates of parameters and buffers inside a step that belong to the batch, not to a micro-batch, and cannot be made so."""

from __future__ import annotations

import torch.fx as fx

from pipepart.errors import ConfigError
from pipepart.recording import Recording
from pipepart.recording.op import has_op, op_of

__all__ = ["check_updates"]


def check_updates(recording: Recording, microbatches: int | str) -> None:
    """Refuse a step that changes parameters by other parameters, unless there is one micro-batch only.

    The same holds for buffers that a module changes which is kept whole.
    """
    if microbatches == 1:
        return
    for path, (buffers, line) in recording.updates.items():
        why = next(
            (note for note in recording.notes if note.startswith(f"kept {path!r} whole")), f"kept {path!r} whole"
        )
        raise ConfigError(
            f"module {path!r}, called at {line}, changes its buffer {buffers[0]!r}, and would do so once for each micro-batch "
            f"({why}). Do one of these: update the buffer by tensor ops, which are recorded and run once for the batch; update "
            "it in the step itself or in a hook (on_train_batch_end); or use microbatches=1."
        )
    found = _followers(recording)
    if found:
        name, others = next(iter(found.items()))
        raise ConfigError(
            f"the step changes parameter {name!r} by {sorted(others)[0]!r}: a recorded step would do so once for each "
            "micro-batch. Do one of these: move the update to a hook that runs once for each batch (on_train_batch_start has "
            "the same effect as the beginning of the step; hooks may use parameters of all stages), or use microbatches=1."
        )


def _followers(recording: Recording) -> dict[str, set[str]]:
    """The parameters that the step changes in place by values of other parameters, with those."""
    parameters = {name for name, _ in recording.root.named_parameters(remove_duplicate=False)}
    memory: dict[object, str] = {}
    for node in recording.graph.nodes:
        if node.op == "get_attr" and str(node.target) in parameters and has_op(node):
            memory.update(dict.fromkeys(op_of(node).writes, str(node.target)))
    found: dict[str, set[str]] = {}
    for node in recording.graph.nodes:
        changed = {memory[key] for key in (op_of(node).mutates if has_op(node) else ()) if key in memory}
        if changed:
            used = _parameters_behind(node, parameters)
            for name in changed:
                if used - {name}:
                    found.setdefault(name, set()).update(used - {name})
    return found


def _parameters_behind(node: fx.Node, parameters: set[str]) -> set[str]:
    """The parameters from which the arguments of an op are computed."""
    found: set[str] = set()
    seen: set[fx.Node] = set()
    todo = list(node.all_input_nodes)
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        if current.op == "get_attr" and str(current.target) in parameters:
            found.add(str(current.target))
        todo += current.all_input_nodes
    return found
