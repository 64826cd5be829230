"""Loss, every gradient and every buffer of a pipeline equal those of one plain process with the same micro-batches."""

from __future__ import annotations

import pytest
import torch
from support.models import build
from support.ranks import run_ranks
from support.reference import assert_close, reference_step

MICROBATCHES = 4


def _sizes(batch: int, microbatches: int) -> list[int]:
    """Written down again on purpose: the rule that users rely on (larger parts first, sizes differ by one at most)."""
    count = min(batch, microbatches)
    return [batch // count + (1 if i < batch % count else 0) for i in range(count)]


def _pipeline_steps(name: str, stages: int, schedule: str, batch_sizes: list[int]):
    from pipepart import Pipeline

    model = build(name)
    torch.manual_seed(1)
    pipe = Pipeline(model, model.batch(8), stages=stages, microbatches=MICROBATCHES, schedule=schedule)
    results = []
    for index, size in enumerate(batch_sizes):
        torch.manual_seed(100 + index)
        batch = model.batch(size)
        loss = pipe.step(*batch) if pipe.stage == 0 else pipe.step(*(torch.full_like(t, 0) for t in batch))
        gradients = {key: p.grad.clone() for key, p in pipe.named_parameters() if p.grad is not None}
        for p in pipe.parameters():
            p.grad = None
        results.append((loss, gradients))
    names = {key for key, _ in pipe.named_parameters()}
    owned = {key: b.clone() for key, b in model.named_buffers() if pipe._runtime.ownership.buffers[key] == pipe.stage}
    return results, names, owned


def _check(name: str, stages: int, schedule: str, batch_sizes: list[int]) -> None:
    answers = run_ranks(stages, _pipeline_steps, name, stages, schedule, batch_sizes)
    model = build(name)
    for index, size in enumerate(batch_sizes):
        torch.manual_seed(100 + index)
        batch = model.batch(size)
        model.zero_grad()
        expected = reference_step(model, batch, _sizes(size, MICROBATCHES))
        seen = set()
        for results, _, _ in answers:
            loss, gradients = results[index]
            assert_close("loss", loss, expected)
            for key, gradient in gradients.items():
                assert_close(f"gradient of {key}", gradient, dict(model.named_parameters())[key].grad)
                seen.add(key)
        assert seen == {key for key, p in model.named_parameters() if p.grad is not None}
    assert set.union(*(names for _, names, _ in answers)) == {key for key, _ in model.named_parameters()}
    buffers = {key: value for _, _, owned in answers for key, value in owned.items()}
    assert set(buffers) == {key for key, _ in model.named_buffers()}
    for key, value in model.named_buffers():
        assert_close(f"buffer {key}", buffers[key], value)


SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v")
MODELS = ("mlp", "gpt", "unet")
CASES = [
    (MODELS[(index + stages - 1) % len(MODELS)], stages, schedule)
    for stages in (1, 2, 3, 4)
    for index, schedule in enumerate(SCHEDULES)
]
"""Every schedule on every number of stages; each model meets every schedule, and every number of stages.

`test_shapes` crosses all schedules and shapes with each of its models, for one batch that does not divide.
"""
QUICK = {("gpt", 2, "gpipe"), ("unet", 2, "1f1b")}


@pytest.mark.parametrize(
    ("name", "stages", "schedule"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in CASES],
)
def test_gradients_equal_one_process(name: str, stages: int, schedule: str) -> None:
    """Batches that divide (8), that do not (7, 5), fewer samples than micro-batches (3), fewer than stages (1)."""
    _check(name, stages, schedule, [8, 7, 5, 3, *([1] if name != "unet" else []), 8])


def test_all_pairs_are_tried() -> None:
    assert set(CASES) >= QUICK
    for first, second, count in ((0, 1, 3 * 4), (0, 2, 3 * 6), (1, 2, 4 * 6)):
        assert len({(case[first], case[second]) for case in CASES}) == count
