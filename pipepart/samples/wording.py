"""What the user is told of samples that meet."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.nn.modules.batchnorm import _BatchNorm

from pipepart.recording import Recording
from pipepart.samples.batch_check import BatchCheck
from pipepart.samples.mixing import Mixing
from pipepart.samples.tail import TailCut

__all__ = ["describe_check", "describe_leaves", "describe_norms"]

_DO = "microbatches=1 trains as one process does; or use a loss and layers that look at one sample at a time."


def describe_check(
    recording: Recording, check: BatchCheck, cut: TailCut | None, refused: str, disagree: Sequence[str] = ()
) -> str:
    """Nothing if all is equal; else the op, by how much it matters, and what is done or can be done about it."""
    mixing = check.mixing
    lines: list[str] = []
    if mixing is None:
        return f"micro-batches were not held against the whole batch: {check.reason}" if check.reason else ""
    if cut is not None and mixing.wrong and not cut.ops:
        lines.append(
            f"{mixing.fault}: the whole batch is not the mean of its micro-batches; it is put together at the end"
        )
    elif cut is not None and mixing.wrong:
        lines.append(
            f"{mixing.fault} makes samples of a batch meet: {_ops(cut)} once per batch on the last stage, on the outputs "
            "of all micro-batches. Each replica does that for its own batch."
        )
    elif cut is not None:
        lines.append(f"{', '.join(cut.buffers)}: updated once per batch, on the last stage")
    elif not mixing.same:
        where = f"{mixing.fault} makes samples of a batch meet" if mixing.fault else "samples of a batch meet"
        lines.append(f"{where}, so micro-batches do not train as the whole batch does: {_how_much(recording, mixing)}")
        lines.append(f"it cannot be run once per batch: {refused}" if refused else "")
        if _flat(recording):
            lines.append(
                "The batch has tensors of one dimension: if these are packed tokens and not samples, micro-batches cut "
                "documents apart. Give padded samples (batch, length) and, where they do not come first, their dimension "
                "(batch_dim=1), a method `split(self, batch, n)` of the module that cuts between documents, or microbatches=1."
            )
        if disagree:
            lines.append(describe_leaves(disagree))
        lines.append(f"do: {_DO}")
    elif refused:
        lines.append(f"a buffer is updated once per micro-batch, not once per batch: {refused}")
    return "\n".join(line for line in lines if line)


def _ops(cut: TailCut) -> str:
    return f"it and {len(cut.ops) - 1} other ops run" if len(cut.ops) > 1 else "it runs"


def _how_much(recording: Recording, mixing: Mixing) -> str:
    found = []
    if mixing.loss is not None and recording.loss_index is not None:
        whole, parts = mixing.loss
        change = abs(parts - whole) / max(abs(whole), 1e-12)
        found.append(f"loss {parts:.6g} instead of {whole:.6g} ({change:.2g} relative)")
    if mixing.gradient_here is not None:
        found.append(f"gradients differ by up to {mixing.gradient_here[0]:.2g} relative ({mixing.gradient_here[1]})")
    wrong = set(mixing.wrong) - {recording.loss_index}
    others = [extra.name for extra in recording.extras if extra.output in wrong]
    if others:
        found.append(f"logged: {', '.join(others[:5])}")
    rest = {i: d for i, d in mixing.differs.items() if i != recording.loss_index and math.isfinite(d)}
    if rest and not others:
        found.append(f"outputs {sorted(rest)} differ by up to {max(rest.values()):.2g} relative")
    return ", ".join(found) + " here"


def _flat(recording: Recording) -> bool:
    """All tensors of the batch have one dimension, and there is more than a target in it."""
    shapes = [spec.shape for spec in recording.inputs if spec.kind == "tensor" and spec.shape]
    return bool(shapes) and all(len(shape) == 1 for shape in shapes)


def describe_leaves(disagree: Sequence[str]) -> str:
    """A note on tensors of the batch that are not cut."""
    if not disagree:
        return ""
    return (
        f"dim 0 is not that of the batch, so every micro-batch gets it whole: {', '.join(disagree)}. If it holds samples "
        "along another dimension, name that: batch_dim=1 for all tensors, batch_dim={path: 1} for one"
    )


def describe_norms(recording: Recording) -> str:
    """A note on layers that look at all samples of a micro-batch, which is what users of pipelines expect of them."""
    if not recording.training:
        return ""
    modules = dict(recording.root.named_modules())
    called = dict.fromkeys(
        str(node.target) if node.op == "call_module" else node.meta["op"].module
        for node in recording.graph.nodes
        if node.op == "call_module" or getattr(node.target, "__name__", "") == "batch_norm"
    )
    layers = [name for name in called if isinstance(modules.get(name), _BatchNorm) and modules[name].training]
    if not layers:
        return ""
    names = ", ".join(layers[:3]) + (f" and {len(layers) - 3} more" if len(layers) > 3 else "")
    return f"BatchNorm normalises each micro-batch by its own statistics: {names}"
