"""The batch check of batches that are split as containers: the container is compared with the parts of its own split."""

from __future__ import annotations

import copy
import sys
import types
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.containers import WithOwnSplit
from support.ranks import run_ranks
from torch import nn

from pipepart import Pipeline, capture
from pipepart.build.batch_verdict import SamplesMeet

SAMPLES = {"0.targets": 0}


class MeanOverRows(WithOwnSplit):
    """Its loss is a mean over rows, of which samples have different numbers."""

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.mse_loss(self.layers(batch["rows"]), batch["targets"][batch["owner"]])


class NormOverRows(WithOwnSplit):
    """Rows of all samples meet in the middle of the network."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4).double()

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden = self.before(batch["rows"])
        hidden = hidden - hidden.mean(0, keepdim=True)
        return super().forward({**batch, "rows": hidden})


class Ranked(WithOwnSplit):
    """Samples meet at the end, where the owner of each row is needed."""

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = self.layers(batch["rows"])
        rows = rows / rows.pow(2).sum().sqrt()
        sums = torch.zeros_like(batch["targets"]).index_add(0, batch["owner"], rows)
        return F.mse_loss(sums, batch["targets"])


def flat(samples: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(samples)
    lengths = torch.randint(1, 5, (samples,))
    rows = torch.randn(int(lengths.sum()), 4).double()
    owner = torch.arange(samples).repeat_interleave(lengths)
    return {"rows": rows, "lengths": lengths, "targets": torch.randn(samples, 2).double(), "owner": owner}


def step(kind: type[nn.Module], **options: Any) -> tuple[list[str], float, dict[str, torch.Tensor]]:
    """Warnings on samples that meet, and the loss and the gradients of a batch of another size than the example."""
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always", SamplesMeet)
        pipe = Pipeline(kind(), (flat(8),), batch_dim=SAMPLES, microbatches=3, **options)
        loss = pipe.step(flat(7))
    said = [str(item.message) for item in given if issubclass(item.category, SamplesMeet)]
    return said, float(loss), {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}


def plain(kind: type[nn.Module], samples: int = 7) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = kind()
    loss = model(flat(samples))
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("kind", "said"), [(WithOwnSplit, False), (MeanOverRows, True), (Ranked, True)])
def test_equal_to_one_process_whatever_the_loss_is_a_mean_over(kind: type[nn.Module], said: bool) -> None:
    answers = run_ranks(2, step, kind, stages=2, timeout=120)
    loss, gradients = plain(kind)
    assert bool(answers[0][0]) is said
    merged = {**answers[0][2], **answers[1][2]}
    assert merged.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(merged[name], gradient, rtol=1e-9, atol=1e-12)
    assert abs(answers[0][1] - loss) < 1e-12


def test_rows_that_meet_in_the_middle_are_named_with_module_and_line() -> None:
    (said,), loss, _ = step(NormOverRows, stages=1)
    assert "sub (test_check_containers.py:" in said or "mean (test_check_containers.py:" in said
    assert "do not train as the whole batch does" in said and "microbatches=1" in said
    assert abs(loss - plain(NormOverRows)[0]) > 1e-3


def test_one_micro_batch_is_not_looked_at() -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SamplesMeet)
        pipe = Pipeline(NormOverRows(), (flat(8),), batch_dim=SAMPLES, stages=1, microbatches=1)
        assert abs(float(pipe.step(flat(7))) - plain(NormOverRows)[0]) < 1e-12


def test_a_large_batch_is_looked_at_in_part() -> None:
    torch.manual_seed(0)
    with pytest.warns(SamplesMeet, match="combines samples of a batch"):
        Pipeline(NormOverRows(), (flat(200),), batch_dim=SAMPLES, stages=1, microbatches=4)


def test_the_table_of_verify(capsys: pytest.CaptureFixture[str]) -> None:
    step(MeanOverRows, stages=1, verify=True)
    table = capsys.readouterr().out
    (row,) = (line for line in table.splitlines() if "gradients of stage 0" in line)
    assert float(row.split()[6].strip("()")) > 1e-3, "micro-batches alone differ"
    assert float(row.split()[8].strip("()")) < 1e-9, "the pipeline does not"


def test_one_captured_graph_holds_for_all_numbers_of_rows_and_samples() -> None:
    class OneSize(WithOwnSplit):
        def split(self, batch: dict[str, torch.Tensor], n: int) -> list[dict[str, torch.Tensor]]:
            return WithOwnSplit.split(self, batch, n)

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.layers(batch["rows"]).pow(2).mean()

    model = OneSize()
    captured = capture(model, ({"rows": torch.randn(6, 4).double(), **_counts(6)},))
    for rows in (5, 6, 11):
        batch = {"rows": torch.randn(rows, 4).double(), **_counts(rows)}
        torch.testing.assert_close(captured.module(batch), model(copy.deepcopy(batch)))


def _counts(samples: int) -> dict[str, torch.Tensor]:
    ones = torch.ones(samples, dtype=torch.long)
    return {"lengths": ones, "targets": torch.zeros(samples, 2).double(), "owner": torch.arange(samples)}


def _from_a_file(name: str) -> types.ModuleType:
    """The same code under another file name, as libraries that write code into temporary files have it."""
    code = (
        "import torch\n"
        "def many(x):\n"
        "    rows = x[x.sum(1) > -100.0]\n"
        "    return rows * 2 if rows.shape[0] != 0 and rows.shape[1] == 4 else rows\n"
    )
    module = types.ModuleType(name)
    exec(compile(code, f"{name}.py", "exec"), vars(module))
    sys.modules[name] = module
    return module


def test_the_hash_does_not_depend_on_the_names_of_files() -> None:
    class Model(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.many = _from_a_file(name).many

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.many(x)).sum()

    hashes = set()
    for name in ("written_ab12", "written_cd34"):
        captured = capture(Model(name), (torch.randn(6, 4),))
        assert name in str([node.args for node in captured.train.graph.nodes])  # the message for people names it
        hashes.add(captured.hash)
    assert len(hashes) == 1
