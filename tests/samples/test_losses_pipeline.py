"""Losses with several denominators over stages, replicas, uneven batches and accumulated batches, in real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.ranks import run_ranks
from torch import nn

LENGTH, CLASSES, WIDTH = 5, 7, 12


class Tagger(nn.Module):
    """Some layers, and a loss with terms of different denominators (`mixed`) or of one (tokens)."""

    def __init__(self, mixed: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.mixed = mixed
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.double()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = x + layer(x).tanh()
        scores = self.head(x)
        mask = y != -100
        loss = F.cross_entropy(scores.flatten(0, 1), y.flatten())
        logs = {
            "tokens": mask.sum(),
            "hits": (scores.argmax(-1) == y)[mask].double().mean(),
            "norm": (x.square().mean(-1) * mask).sum() / mask.sum().clamp(min=1),
        }
        if self.mixed:
            loss = loss + 0.1 * x.square().mean() + 0.01 * (scores.logsumexp(-1) * mask).sum() / mask.any(1).sum()
            loss = loss + 1e-3 * self.head.weight.square().sum()
        return {"loss": loss, **logs}


def samples(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Skewed lengths: the first sample is full, most others have few tokens, the last one has none."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (size, LENGTH), generator=generator)
    lengths = torch.randint(0, 3, (size,), generator=generator)
    lengths[0], lengths[-1] = LENGTH, 0
    return x, y.masked_fill(torch.arange(LENGTH)[None] >= lengths[:, None], -100)


SIZES = {0: (7, 5), 1: (6, 7)}
"""Samples of each replica in two accumulated batches."""


def run(stages: int, replicas: int, schedule: str, accumulate: int, mixed: bool, options: dict[str, Any]) -> Any:
    import torch.distributed as dist

    from pipepart import Pipeline

    model = Tagger(mixed)
    pipe = Pipeline(
        model, samples(8, 0), stages=stages, replicas=replicas, microbatches=4, schedule=schedule, **options
    )
    mine = dist.get_rank() // stages
    batches = [samples(SIZES[mine][index], 10 * mine + index) for index in range(accumulate)]
    results = pipe.steps(batches) if mixed else step_by_step(pipe, batches)
    evaluated = pipe.evaluate(*samples(SIZES[mine][0], 10 * mine))
    return results, {key: p.grad for key, p in pipe.named_parameters()}, evaluated


def step_by_step(pipe: Any, batches: list[tuple[torch.Tensor, ...]]) -> list[Any]:
    results = []
    for batch in batches[:-1]:
        with pipe.accumulate():
            results.append(pipe.step(*batch))
    return [*results, pipe.step(*batches[-1])]


def one_process(mixed: bool, batches: list[tuple[torch.Tensor, ...]]) -> tuple[Any, dict[str, torch.Tensor]]:
    model = Tagger(mixed)
    values = model(*(torch.cat(parts) for parts in zip(*batches)))
    values["loss"].backward()
    return values, {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def check(
    stages: int, replicas: int, schedule: str, accumulate: int, mixed: bool, options: dict[str, Any] | None = None
) -> None:
    answers = run_ranks(stages * replicas, run, stages, replicas, schedule, accumulate, mixed, options or {})
    batches = {(r, i): samples(SIZES[r][i], 10 * r + i) for r in range(replicas) for i in range(accumulate)}
    for rank, (results, _, evaluated) in enumerate(answers):
        for index, values in enumerate(results):  # of the whole batch of this replica
            expected, _ = one_process(mixed, [batches[(rank // stages, index)]])
            assert values.keys() == expected.keys()
            for key, value in values.items():
                torch.testing.assert_close(value, expected[key].detach(), rtol=1e-9, atol=1e-12, msg=f"{key} {index}")
        expected, _ = one_process(mixed, [batches[(rank // stages, 0)]])
        for key, value in evaluated.items():
            torch.testing.assert_close(value, expected[key].detach(), rtol=1e-9, atol=1e-12)
    expected = {key: accumulate * g for key, g in one_process(mixed, list(batches.values()))[1].items()}
    seen = set()
    for _, gradients, _ in answers:
        for key, gradient in gradients.items():
            seen.add(key)
            torch.testing.assert_close(gradient, expected[key], rtol=1e-9, atol=1e-12, msg=f"gradient of {key}")
    assert seen == set(expected)


CASES = [
    (2, 1, "1f1b", 2, True),
    (2, 1, "zb_h1", 2, False),
    (3, 1, "interleaved", 1, True),
    (2, 2, "gpipe", 2, False),
    (2, 2, "1f1b", 2, True),
    (2, 1, "gpipe", 2, True),
    (2, 2, "gpipe", 2, True),
]


@pytest.mark.parametrize(
    ("stages", "replicas", "schedule", "accumulate", "mixed"),
    [CASES[-1], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[:-1])],
)
def test_gradients_of_the_whole_batch(stages: int, replicas: int, schedule: str, accumulate: int, mixed: bool) -> None:
    check(stages, replicas, schedule, accumulate, mixed)


def _alike() -> Any:
    from pipepart import Pipeline
    from pipepart.samples.batch_numbers import EqualWeights

    pipe = Pipeline(Tagger(True), samples(8, 0), microbatches=4)
    batches = [samples(size, index) for index, size in enumerate(SIZES[0])]
    with pytest.warns(EqualWeights, match="Use Pipeline.steps"):
        step_by_step(pipe, batches)
    return {key: p.grad for key, p in pipe.named_parameters()}


def test_batches_that_are_not_known_ahead_count_alike() -> None:
    """Without the other batches, terms of different denominators are exact in each batch, and a warning says so."""
    (gradients,) = run_ranks(1, _alike)
    parts = [one_process(True, [samples(size, index)])[1] for index, size in enumerate(SIZES[0])]
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, parts[0][key] + parts[1][key], rtol=1e-9, atol=1e-12)


def _old_meaning() -> Any:
    from pipepart import Pipeline

    pipe = Pipeline(Tagger(False), samples(8, 0), microbatches=4, loss="microbatch")
    return pipe.step(*samples(8, 4))["loss"], {key: p.grad for key, p in pipe.named_parameters()}


def test_the_old_meaning_is_an_option() -> None:
    """With loss="microbatch", each micro-batch divides by its own tokens and is weighted by its samples."""
    ((loss, gradients),) = run_ranks(1, _old_meaning)
    model = Tagger(False)
    parts = zip(*(leaf.split(2) for leaf in samples(8, 4)))
    expected = sum(model(*part)["loss"] for part in parts) / 4
    assert isinstance(expected, torch.Tensor) and not expected.isnan()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[key], parameter.grad)


def test_other_values_are_refused() -> None:
    from pipepart import PipelineStrategy
    from pipepart.errors import ConfigError

    with pytest.raises(ConfigError, match="loss 'tokens' is not known"):
        PipelineStrategy(loss="tokens")
