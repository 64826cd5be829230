"""Hold a captured model against the original: loss, gradients, buffers, other batch size, eval mode, names, speed."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn

from pipepart.graph import Captured, capture
from pipepart.recording import Recording
from pipepart.recording.execution.ops_run import used_tensors
from pipepart.recording.model_state.state import preserved
from pipepart.recording.recorded_run.ops import is_torch_leaf

__all__ = ["Report", "check_model", "compare", "measure"]


@dataclass
class Report:
    """What was found for one model."""

    name: str
    captured: bool = False
    problems: list[str] = field(default_factory=list)
    ops: int = 0
    seconds: float = 0.0
    largest_op: float = 0.0
    largest_leaf: float = 0.0
    kept_whole: tuple[str, ...] = ()
    speed: float = 0.0

    @property
    def equal(self) -> bool:
        """Captured, and equal in everything that was compared."""
        return self.captured and not self.problems


def measure(
    model: nn.Module, call: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Loss, gradients and buffers of one step, from a fixed random state; the model is left as it was."""
    model.zero_grad(set_to_none=True)
    with preserved(model):
        torch.manual_seed(3)
        loss = call(*args)
        if loss.requires_grad:
            loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        buffers = {name: b.clone() for name, b in model.named_buffers()}
    model.zero_grad(set_to_none=True)
    return loss.detach(), grads, buffers


def real(value: torch.Tensor) -> torch.Tensor:
    """A tensor of any dtype as floats."""
    return torch.view_as_real(value) if value.is_complex() else value.float()


def compare(a: tuple[Any, ...], b: tuple[Any, ...], what: str) -> list[str]:
    problems = []
    if not torch.allclose(a[0], b[0], atol=1e-5, rtol=1e-4, equal_nan=True):
        problems.append(f"{what}: loss {a[0].item()} / {b[0].item()}")
    for kind, left, right in (("gradient", a[1], b[1]), ("buffer", a[2], b[2])):
        if set(left) != set(right):
            problems.append(f"{what}: {kind} of {sorted(set(left) ^ set(right))[:3]}")
        for name in set(left) & set(right):
            if not torch.allclose(real(left[name]), real(right[name]), atol=1e-5, rtol=1e-3, equal_nan=True):
                problems.append(f"{what}: {kind} {name}")
                break
    return problems


def shares(recording: Recording) -> tuple[float, float]:
    """Share of the parameters in the largest op, and in the largest ``torch.nn`` leaf of the model."""
    root = recording.root
    total = sum(p.numel() for p in root.parameters()) or 1
    sizes = {name: p.numel() for name, p in root.named_parameters()}
    ops = [
        sum(sizes.get(name, 0) for name in used_tensors(recording, [node]))
        for node in recording.graph.nodes
        if node.op not in ("placeholder", "get_attr", "output")
    ]
    leaves = [sum(p.numel() for p in m.parameters()) for m in root.modules() if is_torch_leaf(m)]
    single = max(sizes.values(), default=0)
    return max(ops, default=0) / total, max([single, *leaves]) / total


def check_model(
    name: str,
    model: nn.Module,
    example: Callable[[int], tuple[torch.Tensor, ...]],
    *,
    batch: int = 2,
    speed: bool = False,
    equality: bool = True,
) -> Report:
    """Capture a model, in train and eval mode, and compare it with the original.

    Without `equality` only the time of ``capture(model, args)`` (and of a step, with `speed`) is taken.
    """
    report = Report(name)
    torch.manual_seed(0)
    args, other = example(batch), example(batch + 1)
    model.train()
    names = [n for n, _ in model.named_parameters()]
    before = copy.deepcopy(model.state_dict())
    start = time.perf_counter()
    try:
        captured = capture(model, args)
    except Exception as error:
        report.problems.append(f"{type(error).__name__}: {str(error)[:400]}")
        return report
    report.seconds, report.captured = time.perf_counter() - start, True
    recording = captured.train
    report.ops, report.kept_whole = len(recording.ops), recording.leaves
    report.largest_op, report.largest_leaf = shares(recording)
    module = recording.module()
    if equality:
        report.problems += differences(model, captured, module, (args, other), names, before)
    if speed and not report.problems:
        report.speed = side_by_side(model, module, args)
    return report


def differences(
    model: nn.Module,
    captured: Captured,
    module: nn.Module,
    examples: tuple[tuple[Any, ...], tuple[Any, ...]],
    names: list[str],
    before: dict[str, Any],
) -> list[str]:
    """Where a captured model differs from the original, in train and in eval mode, at two batch sizes."""
    problems: list[str] = []
    args, other = examples
    if any(not torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values())):
        problems.append("recording changed the state of the model")
    if [n for n, _ in module.named_parameters()] != names:
        problems.append("parameter names differ")
    try:
        for what, values in (("same size", args), ("other size", other)):
            problems += compare(measure(model, model, values), measure(model, module, values), what)
        model.eval()
        assert captured.eval is not None
        evaluation = captured.eval.module()
        for what, values in (("eval", args), ("eval, other size", other)):
            problems += compare(measure(model, model, values), measure(model, evaluation, values), what)
        model.train()
    except Exception as error:
        problems.append(f"{type(error).__name__}: {str(error)[:400]}")
    return problems


def side_by_side(model: nn.Module, module: nn.Module, args: tuple[Any, ...], rounds: int = 15) -> float:
    """Time of a step of the captured module over that of the original, the median of pairs run in turn."""

    def step(call: Callable[..., Any]) -> float:
        start = time.perf_counter()
        call(*args).backward()
        return time.perf_counter() - start

    for call in (model, module, model, module):
        took = step(call)
    rounds = max(5, min(rounds, int(2.0 / took)))
    ratios = []
    for i in range(rounds):
        pair = (step(model), step(module)) if i % 2 else tuple(reversed((step(module), step(model))))
        ratios.append(pair[1] / pair[0])
    model.zero_grad(set_to_none=True)
    return statistics.median(ratios)
