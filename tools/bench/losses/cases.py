"""All forms of loss in one model, trained by a pipeline and by one process."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from tools.bench.losses.forms import FORMS, Model, batch

__all__ = ["NAMES", "Deep", "apart", "run", "worst"]

SIZES = {0: (9, 7), 1: (7, 6)}
"""Samples of each replica in two accumulated batches."""
LEFT_OUT = ("batch changed", "logs", "by hand dot", "each / batch size", "inputs / largest")
"""Changes the batch that the others use; returns several values; values are shares of those of all replicas."""


class Deep(Model):
    """All forms over a network that is deep enough to be cut."""

    def __init__(self, names: tuple[str, ...]) -> None:
        torch.manual_seed(1)
        super().__init__(self._all)
        self.names = names
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(6))

    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> Any:
        for block in self.blocks:
            x = x + block(x)
        return super().forward(x, *rest)

    def _all(self, model: Any, *values: torch.Tensor) -> dict[str, torch.Tensor]:
        terms = {name: FORMS[name](self, *values) for name in self.names}
        loss = sum((0.5 + index / len(terms)) * term for index, term in enumerate(terms.values()))
        return {"loss": loss, **{name: term.detach() for name, term in terms.items()}}


NAMES = tuple(name for name in FORMS if name not in LEFT_OUT)


def run(rank: int, size: int, stages: int, cases: list[tuple[str, int]]) -> list[Any]:
    from pipepart import Pipeline

    torch.set_default_dtype(torch.float64)
    warnings.filterwarnings("ignore")
    mine, answers = rank // stages, []
    for schedule, accumulate in cases:
        model = Deep(NAMES)
        pipe = Pipeline(model, batch(9, 3), stages=stages, microbatches=4, schedule=schedule)
        values = pipe.steps([batch(SIZES[mine][index], 10 * mine + index) for index in range(accumulate)])
        answers.append((values, {key: p.grad for key, p in pipe.named_parameters() if p.grad is not None}))
    return pytree.tree_map(lambda value: value.numpy(), answers)  # tensors of a process end with it


def _one_process(batches: list[tuple[torch.Tensor, ...]], accumulate: int = 1) -> tuple[Any, dict[str, torch.Tensor]]:
    model = Deep(NAMES)
    model.of_sums = 1 / accumulate
    values = model(*(torch.cat(parts) for parts in zip(*batches)))
    values["loss"].backward()
    return values, {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def apart(got: Any, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest element that is expected."""
    scale = float(expected.detach().abs().max()) or 1.0
    return float((torch.as_tensor(got) - expected.detach()).abs().max()) / scale


def worst(answers: list[Any], stages: int, replicas: int, accumulate: int) -> tuple[float, str]:
    batches = {(r, i): batch(SIZES[r][i], 10 * r + i) for r in range(replicas) for i in range(accumulate)}
    _, gradients = _one_process(list(batches.values()), accumulate)
    found = [(0.0, "")]
    seen = set()
    for rank, (values, own) in enumerate(answers):
        for index, step in enumerate(values):
            expected, _ = _one_process([batches[(rank // stages, index)]])
            found += [(apart(value, expected[key]), key) for key, value in step.items()]
        for key, gradient in own.items():
            seen.add(key)
            found.append((apart(gradient / accumulate, gradients[key]), f"gradient of {key}"))
    if seen != set(gradients):
        found.append((float("inf"), f"no gradient of {sorted(set(gradients) - seen)}"))
    return max(found)
