"""A program as users of Ray Train write it, with one cluster of Ray for all of its runs: `python ray_program.py FOLDER`.

It writes what its runs have found into `FOLDER/answers.json`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import ray
import ray.train
import torch
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import DataLoader, Dataset

import pipepart.ray
from pipepart import PipelineStrategy

SAMPLES, EPOCHS = 32, 3


class Points(Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.linspace(-1, 1, 8, dtype=torch.float64) * (1 + index)
        return torch.sin(x), torch.cos(x[:4])


class Regression(L.LightningModule):
    def __init__(self, dies: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        sizes = ((8, 16), (16, 16), (16, 16), (16, 4))
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(*size), nn.Tanh()) for size in sizes)).double()
        self.dies = dies

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.layers(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        mark = Path(self.dies or "")
        if self.dies and self.global_step == 6 and os.environ["RANK"] == "1" and not mark.exists():
            mark.touch()
            time.sleep(10)  # Ray takes the report of a checkpoint within seconds
            os.kill(os.getpid(), signal.SIGKILL)


def trainer_for(config: dict[str, Any], **more: Any) -> L.Trainer:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return L.Trainer(accelerator="cpu", devices="auto", max_epochs=config["epochs"], **{**quiet, **more})


def work(config: dict[str, Any]) -> None:
    """What a worker does: a fit that goes on from the newest checkpoint, and a validation."""
    strategy = PipelineStrategy(
        stages=config["stages"], microbatches=2, sharded=config.get("sharded", False), timeout=60,
    )  # fmt: skip
    trainer = trainer_for(
        config, strategy=strategy, plugins=[RayLightningEnvironment()], callbacks=[pipepart.ray.ReportCheckpoint()]
    )
    trainer = pipepart.ray.prepare_trainer(trainer)
    module = Regression(config.get("dies"))
    loader = DataLoader(Points(), batch_size=config["batch"])
    with pipepart.ray.newest_checkpoint() as path:
        begun = 0 if path is None else 1
        trainer.fit(module, loader, DataLoader(Points(), batch_size=8), ckpt_path=path)
    found = trainer.validate(module, DataLoader(Points(), batch_size=8), verbose=False)[0]
    state = {name: value.tolist() for name, value in module.state_dict().items()}
    shape = [strategy.mesh.replicas, strategy.mesh.stages, trainer.world_size]
    if trainer.is_global_zero:
        answer = {"shape": shape, "weights": state, "val_loss": found["val_loss"], "resumed": begun}
        Path(config["answer"]).write_text(json.dumps(answer))


def from_dataset(config: dict[str, Any]) -> None:
    """A worker that reads a dataset of Ray."""
    trainer = trainer_for(config, strategy=PipelineStrategy(stages=config["stages"], microbatches=2))
    module, shard = Regression(), ray.train.get_dataset_shard("train")
    seen = []

    class Batches:
        def __iter__(self) -> Any:
            for batch in shard.iter_torch_batches(batch_size=config["batch"]):
                seen.append(sorted(batch["index"].tolist()))
                yield batch["x"], batch["y"]

    pipepart.ray.prepare_trainer(trainer).fit(module, Batches())
    Path(f"{config['answer']}.{trainer.global_rank}").write_text(json.dumps(seen))
    trainer.strategy.barrier()
    if trainer.is_global_zero:
        state = {name: value.tolist() for name, value in module.state_dict().items()}
        read = [json.loads(Path(f"{config['answer']}.{rank}").read_text()) for rank in range(trainer.world_size)]
        Path(config["answer"]).write_text(json.dumps({"weights": state, "seen": read}))


def wrong_callback(config: dict[str, Any]) -> None:
    pipepart.ray.prepare_trainer(
        trainer_for(config, strategy=PipelineStrategy(stages=2), callbacks=[RayTrainReportCallback()])
    )


def wrong_strategy(config: dict[str, Any]) -> None:
    pipepart.ray.prepare_trainer(trainer_for(config, strategy="auto"))


def run(folder: Path, name: str, workers: int, function: Any = work, failures: int = 0, **given: Any) -> dict[str, Any]:
    """One run under Ray: its answer, or the words of its error, and the checkpoints that it has reported."""
    more = {key: given.pop(key) for key in ("datasets", "dataset_config", "resume_from") if key in given}
    answer = folder / f"{name}.json"
    config = {"epochs": EPOCHS, "batch": 8, "answer": str(answer), **given}
    resume = more.pop("resume_from", None)
    target = function
    if resume is not None:

        def target(config: dict[str, Any]) -> None:
            found = Checkpoint(resume)
            before, ray.train.get_checkpoint = ray.train.get_checkpoint, lambda: before() or found
            function(config)

    trainer = TorchTrainer(
        target,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name=name, storage_path=str(folder / "storage"), failure_config=FailureConfig(max_failures=failures),
            checkpoint_config=CheckpointConfig(num_to_keep=None),
        ),
        **more,
    )  # fmt: skip
    try:
        result = trainer.fit()
    except Exception as error:
        return {"error": str(error)}
    found = json.loads(answer.read_text())
    reported = result.best_checkpoints if result.checkpoint is not None else []
    return {**found, "metrics": result.metrics, "checkpoints": [checkpoint.path for checkpoint, _ in reported]}


def rows() -> Any:
    items = []
    for index in range(SAMPLES):
        x, y = Points()[index]
        items.append({"index": index, "x": x.numpy(), "y": y.numpy()})
    return ray.data.from_items(items)


def main(folder: Path) -> None:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=bool(os.environ.get("SHOWN")))
    answers: dict[str, Any] = {}
    answers["pipeline"] = run(folder, "pipeline", 2, stages=2)
    first = answers["pipeline"]["checkpoints"][0] if "checkpoints" in answers["pipeline"] else None
    answers["other shape"] = run(folder, "other", 3, stages=3, resume_from=first)
    answers["killed"] = run(folder, "killed", 2, failures=1, stages=2, sharded=True, dies=str(folder / "died"))
    answers["replicas"] = run(folder, "replicas", 4, stages=2, batch=4)
    given = {"function": from_dataset, "stages": 2, "batch": 4}
    split = pipepart.ray.ReplicaDataConfig(stages=2)
    answers["data"] = run(folder, "data", 4, datasets={"train": rows()}, dataset_config=split, epochs=1, **given)
    answers["data by rank"] = run(folder, "ranks", 2, datasets={"train": rows()}, epochs=1, **given)
    answers["callback"] = run(folder, "callback", 2, wrong_callback)
    answers["strategy"] = run(folder, "strategy", 1, wrong_strategy)
    (folder / "answers.json").write_text(json.dumps(answers))
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
