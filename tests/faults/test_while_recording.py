"""Models that talk to other ranks themselves, and ranks that fail alone while a model is recorded: all ranks say why."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from support.ranks import run_ranks
from torch import nn
from torch.distributed import all_reduce

from pipepart.errors import CaptureError, PipelineError


def _gathered(x: torch.Tensor) -> torch.Tensor:
    everywhere = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, x)
    return torch.cat(everywhere)[: len(x)]


def _reduced(x: torch.Tensor) -> torch.Tensor:
    total = x.detach().clone()
    all_reduce(total)  # a name that was taken before anything is patched
    return x + total


class ReducedBackward(torch.autograd.Function):
    """Forward gives its input; only backward talks, as for tensors that are split over ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total


TALKS = {
    "all_gather": _gathered,
    "all_reduce": _reduced,
    "all_gather of torch.distributed.nn": lambda x: torch.cat(differentiable.all_gather(x.contiguous()))[: len(x)],
    "all_reduce in backward": ReducedBackward.apply,
    "all_gather_tensor": lambda x: functional.all_gather_tensor(x, 0, dist.group.WORLD)[: len(x)],
}


class Experts(nn.Module):
    """Shares its samples between ranks whenever there are several, as libraries of experts do."""

    def __init__(self, talk: str) -> None:
        super().__init__()
        self.first, self.second, self.talk = nn.Linear(6, 6), nn.Linear(6, 6), talk

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(TALKS[self.talk](self.first(x)))


class Net(nn.Module):
    def __init__(self, talk: str) -> None:
        super().__init__()
        self.stem, self.experts, self.head = nn.Linear(6, 6), Experts(talk), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.experts(self.stem(x).relu())).pow(2).mean()


def _talking(talk: str) -> str:
    from pipepart import Pipeline

    try:
        Pipeline(Net(talk), (torch.randn(4, 6),), stages=2, microbatches=2, timeout=200.0)
    except CaptureError as error:
        dist.barrier()  # process groups are as they were, and nothing that was sent is left over
        return str(error)
    return "recorded"


@pytest.mark.parametrize("talk", TALKS)
def test_a_model_that_talks_to_other_ranks_is_refused_by_name_on_all(talk: str) -> None:
    for text in run_ranks(2, _talking, talk):
        assert "where: " + ("" if "backward" in talk else "module 'experts', ") + "test_while_recording.py:" in text
        assert f"calls torch.distributed.{talk.partition(' ')[0]} itself, with 2 ranks" in text
        assert "is_distributed=False" in text


class FailsAlone(nn.Module):
    def __init__(self, rank: int, mode: bool) -> None:
        super().__init__()
        self.net, self.rank, self.mode = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), rank, mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == self.rank and self.training == self.mode:
            raise OSError("the table of this rank cannot be read")
        return self.net(x).pow(2).mean()


def _alone(rank: int, training: bool) -> tuple[str, str, float]:
    from pipepart import Pipeline

    started = time.monotonic()
    try:
        Pipeline(FailsAlone(rank, training), (torch.randn(4, 4),), stages=2, microbatches=2, timeout=200.0)
    except (OSError, PipelineError) as error:
        return "own" if isinstance(error, OSError) else "pipeline", str(error), time.monotonic() - started
    return "nothing", "", 0.0


@pytest.mark.parametrize(("rank", "training"), [(0, True), (1, True), (1, False)])
def test_a_rank_that_fails_alone_is_named_by_all(rank: int, training: bool) -> None:
    answers = run_ranks(2, _alone, rank, training)
    kind, text, _ = answers[1 - rank]
    assert answers[rank][0] == "own"
    assert kind == "pipeline" and "another rank failed first" in text
    assert f"rank {rank}" in text and "the table of this rank cannot be read" in text
    assert answers[1 - rank][2] < 120.0, "it does not wait for the time limit"


def _gathers_in_its_step(own: bool) -> str:
    import lightning.pytorch as L
    from torch.utils.data import DataLoader, TensorDataset

    from pipepart import PipelineStrategy

    class Gathers(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

        def training_step(self, batch, batch_idx):
            out = self.net(batch[0])
            return (self.all_gather(out, sync_grads=True) if own else _gathered(out)).pow(2).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = L.Trainer(
        strategy=PipelineStrategy(stages=2, microbatches=2), devices=2, accelerator="cpu", max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    try:
        trainer.fit(Gathers(), DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4))
    except CaptureError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize(("own", "words"), [(False, "torch.distributed.all_gather itself"), (True, "trainer.strategy")])
def test_a_step_that_gathers_is_refused_by_name_on_all(own: bool, words: str) -> None:
    for text in run_ranks(2, _gathers_in_its_step, own):
        assert words in text
