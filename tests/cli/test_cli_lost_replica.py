"""A run of several replicas that loses one in the middle of a step: the others go on, and the lost one joins them again."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cli_programs import end, path_with, start
from torch.utils.data import DistributedSampler

from pipepart.cli.config import checked, compose_config
from pipepart.cli.replica_jobs import config_of
from pipepart.cli.train import check_run
from pipepart.errors import ConfigError

MODULE = """
import os, pathlib, signal, time
import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, SIZE, FATAL = 96, 4, 3

def data():
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    classes = torch.randint(0, 4, (SAMPLES,), generator=generator)
    classes[torch.rand(SAMPLES, generator=generator) < 0.3] = -100  # replicas have different numbers of targets
    return inputs, classes

def network():
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Sequential(*(nn.Linear(n, m, dtype=torch.float64) for n, m in ((5, 8), (8, 8), (8, 4))))

class Samples(L.LightningDataModule):
    def __init__(self, batch_size=SIZE, samples=SAMPLES, path=None):
        super().__init__()

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.arange(SAMPLES), *data()), SIZE, shuffle=True)

    def val_dataloader(self):
        return DataLoader(TensorDataset(torch.arange(SAMPLES), *data()), 24)

class Loses(L.LightningModule):
    def __init__(self, optimizer, scheduler=None, width=1, depth=1):
        super().__init__()
        self.net, self.make = network(), optimizer

    def configure_optimizers(self):
        return self.make(self.parameters())

    def loss(self, batch):
        return F.cross_entropy(self.net(batch[1]), batch[2])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch))

    def on_train_batch_start(self, batch, batch_idx):
        replica, begun, _ = os.environ["PIPEPART_REPLICA"].split("/")
        stage, step, lost = os.environ["RANK"], self.trainer.global_step, os.environ["LOST"]
        if stage == "0":
            with open(f"seen-{replica}-{begun}", "a") as file:
                print(step, self.trainer.current_epoch, batch_idx, *batch[0].tolist(), file=file)
        if begun == "0" and step == FATAL and replica == lost and stage == os.environ["STAGE"]:
            if os.environ["HOW"] == "raise":
                raise ValueError("boom on purpose")
            os.kill(os.getpid(), signal.SIGKILL)
        if begun == "0" and replica != lost and stage == "0" and step == FATAL + 3:
            until, wish = time.monotonic() + 200, pathlib.Path(os.environ["PIPEPART_SPARE_FOLDER"], "wish")
            while not wish.exists() and time.monotonic() < until:
                time.sleep(0.01)

    def on_train_end(self):
        replica, begun, _ = os.environ["PIPEPART_REPLICA"].split("/")
        own = {name: p.detach() for name, p in self.trainer.strategy.runtime.named_parameters().items()}
        torch.save(own, f"end-{replica}-{os.environ['RANK']}.pt")
"""
STEPS, FATAL, SIZE = 15, 3, 4


def _imported(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("loses_here", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _batches(folder: Path, samples: int, lost: int) -> dict[int, list[int]]:
    """The samples of each step on the replicas that have made it, which are checked to be those of their samplers."""
    found: dict[int, list[int]] = defaultdict(list)
    for file in folder.glob("seen-*"):
        _, replica, begun = file.name.split("-")
        sampler = DistributedSampler(range(samples), 2, int(replica), seed=1)  # type: ignore[arg-type]
        for line in file.read_text().splitlines():
            step, epoch, number, *indices = map(int, line.split())
            sampler.set_epoch(epoch)
            assert indices == list(sampler)[SIZE * number : SIZE * (number + 1)], (file.name, line)
            if (int(replica), int(begun), step) != (lost, 0, FATAL):
                found[step] += indices
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("stages", "lost", "stage", "how", "accumulate"),
    [(1, 1, 0, "kill", 1), (2, 1, 1, "kill", 1), (1, 0, 0, "raise", 2)],
    ids=["2x1", "2x2", "first-raises"],
)
def test_the_others_go_on_and_the_lost_one_joins(
    tmp_path: Path, stages: int, lost: int, stage: int, how: str, accumulate: int
) -> None:
    (tmp_path / "loses.py").write_text(MODULE)
    words = ["train", "recipe=mlp", "model._target_=loses.Loses", "data._target_=loses.Samples", "allow=[loses]"]
    words += [
        "logger=csv",
        "optimizer.lr=0.01",
        "output=run",
        f"trainer.max_steps={STEPS}",
        "trainer.val_check_interval=6",
    ]
    words += [f"trainer.accumulate_grad_batches={accumulate}", f"devices={2 * stages}", "strategy.microbatches=2"]
    words += [
        "strategy.replicas=2",
        f"strategy.stages={stages}",
        "launcher.lost_replica=continue",
        "launcher.failures=1",
    ]
    told = {"LOST": str(lost), "STAGE": str(stage), "HOW": how}
    process = start(words, tmp_path, PYTHONPATH=path_with(tmp_path), **told)
    said = end(process)
    assert process.returncode == 0, said
    assert f"the other replicas go on; replica {lost} starts again and joins them" in said
    assert ("boom on purpose" if how == "raise" else f"rank {stage} was ended by SIGKILL") in said
    module = _imported(tmp_path / "loses.py")
    inputs, classes = module.data()
    batches = _batches(tmp_path, len(inputs), lost)
    alone, together = SIZE * accumulate, 2 * SIZE * accumulate
    sizes = [len(batches[step]) for step in range(STEPS)]
    back = sizes.index(together, FATAL)
    assert sizes == [together] * FATAL + [alone] * (back - FATAL) + [together] * (STEPS - back)
    assert FATAL + 3 <= back < STEPS - 1, sizes
    network = module.network()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(network(inputs[batches[step]]), classes[batches[step]]).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)  # as the recipe does
        optimizer.step()
    expected = {f"net.{name}": value for name, value in network.state_dict().items()}
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["global_step"] == STEPS
    for name, value in expected.items():
        torch.testing.assert_close(saved["state_dict"][name], value, rtol=0, atol=1e-9)
    for number in range(stages):
        one, other = (torch.load(tmp_path / f"end-{replica}-{number}.pt", weights_only=True) for replica in range(2))
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["steps"], result["replicas"], result["stages"]) == (STEPS, 2, stages)
    assert not list((tmp_path / "run" / "replica-1").glob("**/*.ckpt"))


REFUSED = {
    "strategy.replicas=auto": "needs strategy.replicas, at least 2",
    "strategy.replicas=1": "needs strategy.replicas, at least 2",
    "strategy.sync=sharded": r"strategy\.sync='sharded' is not for",
    "strategy.sharded=true": r"strategy\.sharded=True is not for",
    "strategy.loss=microbatch": r"strategy\.loss='microbatch' is not for",
    "strategy.compile=true": r"strategy\.compile=True is not for",
    "trainer.max_time=1": r"trainer\.max_time=.* is not for",
    "launcher.nodes=2": "is for replicas on one machine",
    "launcher.lost_replica=wait": "must be null or continue, got 'wait'",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_is_refused(word: str) -> None:
    words = ["recipe=mlp", "devices=2", "strategy.replicas=2", "launcher.lost_replica=continue", word]
    config = checked(compose_config(words))
    with pytest.raises(ConfigError, match=REFUSED[word]):
        check_run(config)


def test_the_job_of_a_replica() -> None:
    words = ["recipe=mlp", "devices=4", "strategy.replicas=2", "launcher.lost_replica=continue"]
    config = checked(compose_config(words))
    check_run(config)
    first, second = (config_of(config, replica) for replica in range(2))
    for own in (first, second):
        assert (own["devices"], own["strategy"]["stages"], own["strategy"]["replicas"]) == (2, 2, 1)
        assert own["launcher"]["lost_replica"] is None and own["launcher"]["failures"] == 0
    assert first["callbacks"] == config["callbacks"] and first["logger"] == config["logger"]
    assert not second["logger"] and set(second["callbacks"]) == {"checkpoint"}
    assert not re.search("Progress|Monitor", str(second["callbacks"]))
