"""Hold a real pipeline of two stages, in two processes, against the model on the whole batch: loss and all gradients.

Both sides are made comparable first: micro-batches draw other random numbers than the whole batch, so nothing is dropped;
BatchNorm normalises each micro-batch by itself (documented), so it uses its running statistics.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from pipepart import Pipeline
from pipepart.build.batch_verdict import SamplesMeet
from pipepart.errors import PipepartError
from pipepart.recording.inputs import trees
from pipepart.samples.pieces import pieces_of

__all__ = ["Share", "check_share", "together"]

TOLERANCES = {"float64": (1e-7, 1e-10), "mixed": (1e-5, 1e-7), "float32": (1e-3, 1e-5)}
"""Relative (ten times as much for gradients) and absolute; ``mixed`` computes parts in float32 whatever its parameters are."""

Built = tuple[nn.Module, Callable[[int], tuple[Any, ...]]]


@dataclass
class Share:
    """The finding of one rank for its stage."""

    problems: list[str] = field(default_factory=list)
    refused: str = ""
    """The reason, when pipepart refused the model by name."""
    warned: str = ""
    """The warning that samples meet in this model, so that micro-batches are another computation."""
    as_parts: bool = False
    """The pipeline gives what one process gives on the micro-batches, one after the other."""
    apart: tuple[float, str] = (0.0, "")
    """The largest difference of a gradient, relative to the largest element of that gradient, and its parameter."""
    held: tuple[str, ...] = ()
    """Parameters with a gradient on this stage."""
    expected: tuple[str, ...] = ()
    """Parameters with a gradient in one process."""
    dtype: str = "float64"


def check_share(build: Callable[[], Built], batch: int = 4) -> Share:
    """Run on each of two ranks: one step of the pipeline, compared with one process on the whole batch."""
    dtype = torch.float64
    singles = _Singles()
    try:
        loss, expected, args = _one_process(build, batch, dtype, singles)
    except (RuntimeError, TypeError):  # a model that makes tensors of float32 itself
        dtype = torch.float32
        loss, expected, args = _one_process(build, batch, dtype, nullcontext())
    kind = "mixed" if dtype == torch.float64 and singles.seen else str(dtype).removeprefix("torch.")
    share = Share(expected=tuple(expected), dtype=kind)
    try:
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always", SamplesMeet)
            model, _ = _comparable(build, dtype)
            pipe = Pipeline(model, args, stages=dist.get_world_size(), microbatches=2, timeout=60.0)
            got = pipe.step(*args)
        share.warned = next((str(item.message) for item in given if issubclass(item.category, SamplesMeet)), "")
    except PipepartError as error:
        share.refused = " ".join(str(error).split())[:400]
        return share
    gradients = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
    share.held = tuple(gradients)
    share.problems = _differences(got, gradients, loss, expected, kind)
    if share.problems:
        found = (
            (_relative(gradient, expected[name]), name) for name, gradient in gradients.items() if name in expected
        )
        share.apart = max(found, default=(0.0, ""))  # a stage may have no parameters
        loss, expected = _one_process_in_parts(build, args, dtype)
        share.as_parts = not _differences(got, gradients, loss, expected, kind)
    return share


def _differences(
    got: torch.Tensor, gradients: dict[str, Any], loss: torch.Tensor, expected: dict[str, Any], kind: str
) -> list[str]:
    """Where a stage differs from one process."""
    rtol, atol = TOLERANCES[kind]
    problems = []
    if not torch.allclose(got.double(), loss.double(), rtol=rtol, atol=atol):
        relative = abs(got.item() - loss.item()) / max(abs(loss.item()), 1e-30)
        problems.append(f"loss {got.item()!r}, one process {loss.item()!r} ({relative:.1e})")
    for name, gradient in gradients.items():
        if name not in expected:
            if gradient.abs().max() > 0:
                problems.append(f"{name} has a gradient, in one process it has none")
        elif not torch.allclose(gradient, expected[name], rtol=10 * rtol, atol=atol):
            problems.append(f"gradient of {name} is {_relative(gradient, expected[name]):.1e} of its largest apart")
    return problems


def _relative(gradient: torch.Tensor, expected: torch.Tensor) -> float:
    return (gradient - expected).abs().max().item() / max(expected.abs().max().item(), 1e-30)


def together(shares: list[Share]) -> tuple[str, list[str]]:
    """The result of all ranks, and the findings: ``equal``, ``refused``, ``flagged`` or ``differs``.

    ``flagged`` is a warning that is right: the model gives other values on micro-batches than on the whole batch, also in
    one process, and the pipeline gives exactly those.
    """
    refused = [share.refused for share in shares if share.refused]
    if refused:
        return "refused", refused[:1]
    problems = [problem for share in shares for problem in share.problems]
    held = {name for share in shares for name in share.held}
    missing = sorted(set(shares[0].expected) - held)
    if missing:
        problems.append(f"no stage has a gradient of {missing[:3]}")
    if not shares[0].expected:
        problems.append("the model has no gradient in one process: nothing was compared")
    warned = [share.warned for share in shares if share.warned]
    if problems and warned and not missing and all(share.as_parts or not share.problems for share in shares):
        size, name = max(share.apart for share in shares)
        return "flagged", [f"gradients up to {size:.1e} of their largest apart ({name})", warned[0].splitlines()[0]]
    return ("differs" if problems else "equal"), problems


def _one_process(
    build: Callable[[], Built], batch: int, dtype: torch.dtype, watching: AbstractContextManager[Any]
) -> tuple[torch.Tensor, dict[str, Any], Any]:
    model, example = _comparable(build, dtype)
    torch.manual_seed(1)
    args = trees.map_structure(lambda leaf: leaf.to(dtype) if _floats(leaf) else leaf, example(batch))
    torch.manual_seed(2)
    with watching:
        loss = model(*copy.deepcopy(args))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, args


def _one_process_in_parts(
    build: Callable[[], Built], args: Any, dtype: torch.dtype
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The means of the losses and gradients of two micro-batches, without a pipeline."""
    model, _ = _comparable(build, dtype)
    pieces, losses = pieces_of((args, {}), model, 0, True, 2), []
    if pieces is not None:
        parts = [piece.batch[0] for piece in pieces.split((args, {}), 2)]
    else:
        parts = [trees.map_structure(lambda leaf, i=i: _half(leaf, i), args) for i in range(2)]  # type: ignore[misc]
    for part in parts:
        loss = model(*copy.deepcopy(part)) / 2
        loss.backward()
        losses.append(loss.detach())
    return losses[0] + losses[1], {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _half(leaf: Any, index: int) -> Any:
    return leaf.chunk(2)[index] if isinstance(leaf, torch.Tensor) else leaf


def _comparable(build: Callable[[], Built], dtype: torch.dtype) -> Built:
    torch.manual_seed(0)
    random.seed(0)  # some libraries choose initial values with it
    np.random.seed(0)
    model, example = build()
    model.to(dtype).train()
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or (name == "p" and "Drop" in type(module).__name__)):
                setattr(module, name, 0.0)
            elif _floats(value):  # a constant that is no buffer
                setattr(module, name, value.to(dtype))
        if isinstance(module, _BatchNorm):
            module.eval()
            module.train = _stays.__get__(module)  # type: ignore[method-assign]
    return model, example


def _stays(module: nn.Module, mode: bool = True) -> nn.Module:
    """In place of `train`: the module keeps its mode."""
    return module


class _Singles(TorchDispatchMode):
    """Notices ops that give float32."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32 and out.dim():
            self.seen = True
        return out


def _floats(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
