"""PipelineMonitor: the same figures in every logger, files to look at, and no run that fails for its tracking."""

from __future__ import annotations

import csv
import json
import logging
import re
import statistics
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from support.lightning_modules import Module, loader
from support.ranks import run_ranks

from pipepart import PipelineStrategy
from pipepart.cli.fit import _write_results
from pipepart.errors import ConfigError
from pipepart.lightning.monitor import PipelineMonitor
from pipepart.lightning.tracking import SafeWandbLogger
from pipepart.planning import Plan
from pipepart.planning.describe import format_seconds
from pipepart.report import load_graph, load_timeline
from pipepart.report.account import load_account
from pipepart.report.figures import measured_step

QUIET = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "use_distributed_sampler": False,
}
STEPS, EVERY = 8, 2


class Broken(Logger):
    """A logger whose server is gone."""

    name, version = "broken", 0

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def log_metrics(self, metrics, step=None):
        self.calls += 1
        raise ConnectionError("no route to host")

    def log_hyperparams(self, params, *args, **kwargs):
        pass


class Norms(L.Callback):
    """The gradient norm that clipping sees."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        held = trainer.strategy.runtime.named_parameters().values()
        before = [p.grad.clone() for p in held if p.grad is not None]
        self.seen.append(float(trainer.strategy.runtime.clip_grad_norm(list(pl_module.parameters()), 1e9)))
        assert all(torch.equal(a, p.grad) for a, p in zip(before, (p for p in held if p.grad is not None)))


def _fit(place: str, stages: int, wandb: bool, accumulate: int = 1, **more: Any):
    loggers: list[Logger] = [CSVLogger(place, "", "csv"), TensorBoardLogger(place, "", "tensorboard"), Broken()]
    if wandb:
        loggers.append(SafeWandbLogger(save_dir=place, project="pipepart", name="test"))
        if torch.distributed.get_rank() == 0:
            loggers[-1].log_hyperparams({"seed": 3, "model": {"name": "gpt"}})
    norms = Norms()
    trainer = L.Trainer(
        strategy=PipelineStrategy(stages=stages, microbatches=4),
        devices=stages,
        max_steps=STEPS // accumulate,
        accumulate_grad_batches=accumulate,
        logger=loggers,
        callbacks=[PipelineMonitor(EVERY, **more), norms],
        **QUIET,
    )
    trainer.fit(Module("gpt"), loader("gpt", 64, 8))
    if wandb and trainer.is_global_zero:
        loggers[-1].experiment.finish()
    assert not trainer.strategy.runtime.tracing._asked
    return trainer.strategy.plan.to_json(), norms.seen, loggers[2].calls, str(trainer.log_dir)


def finished_run(folder: Path) -> list[Any]:
    """All records of the offline run in a folder. Its service writes the last of them shortly after `finish`."""
    (path,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    for _ in range(1200):
        found = list(records_of(path))
        if any(record.WhichOneof("record_type") == "exit" for record in found):
            return found
        time.sleep(0.1)
    raise AssertionError(f"{path} was not finished")


def records_of(path: Path) -> Iterator[Any]:
    """The records in a file of an offline run: a log in blocks of 32 KB, after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), 7, b""
    assert data[:4] in (b":W&B", b"")
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + length > len(data):
            return  # still being written
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def csv_rows(folder: Path) -> list[dict[str, str]]:
    rows = list(csv.DictReader((folder / "csv" / "metrics.csv").open()))
    return [row for row in rows if row.get("pipepart/step_seconds")]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One training on two stages with all loggers, read back from its files."""
    folder = tmp_path_factory.mktemp("monitored")
    answers = run_ranks(2, _fit, str(folder), 2, True)
    return folder, answers


@pytest.mark.slow
def test_csv_has_the_figures_of_every_interval(run):
    folder, answers = run
    plan = Plan.from_json(answers[0][0])
    rows = csv_rows(folder)
    assert [int(row["step"]) for row in rows] == [2, 4, 6, 8]
    for row in rows:
        assert float(row["pipepart/predicted_step_seconds"]) == pytest.approx(plan.step_time)
        step = float(row["pipepart/step_seconds"])
        assert step > 0
        assert float(row["pipepart/samples_per_second"]) == pytest.approx(plan.batch_size / step)
        assert float(row["pipepart/prediction_error"]) == pytest.approx(plan.step_time / step - 1)
        assert 0 <= float(row["pipepart/bubble"]) < 1
        traced = float(row["pipepart/traced_step_seconds"])
        for stage in (0, 1):
            names = ("forward_seconds", "backward_seconds", "idle_seconds")
            parts = [float(row[f"pipepart/stage_{stage}/{name}"]) for name in names]
            assert all(part >= 0 for part in parts)
            assert sum(parts) == pytest.approx(traced)
            assert float(row[f"pipepart/stage_{stage}/memory_bytes"]) > 1e7
    assert len({row["pipepart/traced_step_seconds"] for row in rows}) == 4  # traced anew in every interval


@pytest.mark.slow
def test_gradient_norm_is_that_of_the_whole_model(run):
    folder, answers = run
    recorded = [float(row["pipepart/gradient_norm"]) for row in csv_rows(folder)]
    assert recorded == pytest.approx(answers[0][1][1::2], rel=1e-6)


@pytest.mark.slow
def test_a_logger_that_fails_is_left_alone(run):
    _, answers = run
    assert [answer[2] for answer in answers] == [1, 0]


@pytest.mark.slow
def test_tensorboard_has_the_same_figures(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, _ = run
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    rows = csv_rows(folder)
    for name in ("pipepart/step_seconds", "pipepart/stage_1/backward_seconds", "pipepart/gradient_norm"):
        scalars = events.Scalars(name)
        assert [scalar.step for scalar in scalars] == [int(row["step"]) for row in rows]
        assert [scalar.value for scalar in scalars] == pytest.approx([float(row[name]) for row in rows], rel=1e-5)
    assert "pipepart/plan/text_summary" in events.Tags()["tensors"]


@pytest.mark.slow
def test_offline_wandb_run_is_read_back(run):
    folder, answers = run
    plan = Plan.from_json(answers[0][0])
    config: dict[str, Any] = {}
    history: list[dict[str, Any]] = []
    artifacts: dict[str, set[str]] = {}
    for record in finished_run(folder):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            config.update({item.key: json.loads(item.value_json) for item in record.run.config.update})
        elif kind == "config":
            config.update(
                {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.config.update}
            )
        elif kind == "history":
            items = record.history.item
            history.append({i.key or " ".join(i.nested_key): json.loads(i.value_json) for i in items})
        elif kind == "request" and record.request.WhichOneof("request_type") == "log_artifact":
            artifact = record.request.log_artifact.artifact
            artifacts[artifact.name] = {entry.path for entry in artifact.manifest.contents}
        elif kind == "artifact":
            artifacts[record.artifact.name] = {entry.path for entry in record.artifact.manifest.contents}
    assert config["seed"] == 3
    assert config["model"] == {"name": "gpt"}
    assert config["plan"]["hash"] == plan.hash
    assert config["plan"]["predicted_step_seconds"] == pytest.approx(plan.step_time)
    rows = [row for row in history if "pipepart/step_seconds" in row]
    assert [row["trainer/global_step"] for row in rows] == [2, 4, 6, 8]
    for recorded, row in zip(rows, csv_rows(folder), strict=True):
        for name in row:
            if name.startswith("pipepart/"):
                assert recorded[name] == pytest.approx(float(row[name]), rel=1e-5)
    assert [row["pipepart/report _type"] for row in history if "pipepart/report _type" in row] == ["html-file"]
    page = next((folder / "wandb").glob("offline-run-*/files/media/html/**/*.html"))
    assert 'id="data"' in page.read_text()
    assert artifacts[f"plan-{plan.hash}"] == {"plan.json", "graph.json"}
    assert artifacts[f"report-{plan.hash}"] == {"report.html", "trace.json", "account.json"}


@pytest.mark.slow
def test_run_folder_has_plan_graph_trace_and_page(run):
    _, answers = run
    folder = Path(answers[0][3])
    plan = Plan.load(folder / "plan.json")
    assert load_graph(folder / "graph.json").name == plan.ops
    assert load_timeline(folder / "trace.json").stages == 2
    assert load_account(folder / "account.json").stages == 2
    text = (folder / "report.html").read_text()
    assert '"known":true' in text
    assert '"measured":{' in text
    assert '"account":{' in text


def test_one_device_with_accumulation_and_own_folder(tmp_path):
    plan, norms, _, _ = _fit(str(tmp_path), 1, False, accumulate=2, folder=tmp_path / "here")
    rows = csv_rows(tmp_path)
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4]
    assert [float(row["pipepart/gradient_norm"]) for row in rows] == pytest.approx(norms, rel=1e-6)
    assert Plan.load(tmp_path / "here" / "plan.json") == Plan.from_json(plan)


def test_one_measured_step_is_printed_reported_and_written(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("pipepart.lightning.pipeline_strategy.tell", said.append)
    strategy = PipelineStrategy(stages=1, microbatches=2)
    trainer = L.Trainer(
        strategy=strategy,
        devices=1,
        max_steps=6,
        logger=False,
        callbacks=[PipelineMonitor(2, tmp_path / "watched")],
        **QUIET,
    )
    trainer.fit(Module("mlp"), loader("mlp", 64, 8))
    usual = statistics.median(strategy.step_times[3:])
    assert f"measured {format_seconds(usual)} a step (median of 3," in said[-2]
    assert "where the time of a step goes" in said[-1]
    _write_results(trainer, strategy, tmp_path, {"name": "mlp"})
    assert json.loads((tmp_path / "result.json").read_text())["measured_step"] == usual
    for page in (tmp_path / "watched" / "report.html", tmp_path / "report.html"):
        found = re.search(r'"measured_step":([^,}]+)', page.read_text())
        assert found is not None
        assert float(found.group(1)) == pytest.approx(usual)


@pytest.mark.parametrize(("steps", "usual"), [([], None), ([5.0], 5.0), ([9.0, 8.0, 7.0, 1.0, 2.0, 3.0], 2.0)])
def test_the_first_steps_do_not_count(steps, usual):
    assert measured_step(steps) == usual


def test_other_strategies_are_left_in_peace(tmp_path):
    trainer = L.Trainer(max_steps=3, logger=False, callbacks=[PipelineMonitor(1, tmp_path / "no")], **QUIET)
    trainer.fit(Module("mlp"), loader("mlp", 32, 8))
    assert not (tmp_path / "no").exists()


@pytest.mark.slow
def test_wandb_that_cannot_be_reached_does_not_end_the_run(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_MODE", "online")  # so that it is put back afterwards
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    logger = SafeWandbLogger(save_dir=str(tmp_path), project="pipepart", offline=False, timeout=1.0)
    trainer = L.Trainer(
        strategy=PipelineStrategy(stages=1, microbatches=2),
        devices=1,
        max_steps=3,
        logger=logger,
        callbacks=[PipelineMonitor(1, tmp_path)],
        **QUIET,
    )
    with pytest.warns(UserWarning, match="wandb cannot be reached"):
        trainer.fit(Module("mlp"), loader("mlp", 32, 8))
    logger.experiment.finish()
    assert trainer.global_step == 3
    names = {i.key or " ".join(i.nested_key) for r in finished_run(tmp_path) for i in r.history.item}
    assert "pipepart/step_seconds" in names, sorted(names)


def test_refuses_an_impossible_interval():
    with pytest.raises(ConfigError, match="at least 1"):
        PipelineMonitor(every_n_steps=0)


def test_files_that_cannot_be_written_do_not_end_the_run(tmp_path, caplog):
    """The last checkpoint is written first; each file that fails is one warning."""
    for name in ("plan.json", "report.html"):
        (tmp_path / name).symlink_to("/dev/full")
    (tmp_path / "trace.json").mkdir()
    last = ModelCheckpoint(tmp_path / "checkpoints", save_last=True, save_top_k=0)
    monitor = PipelineMonitor(1, tmp_path)
    options = {**QUIET, "enable_checkpointing": True, "max_steps": 4, "logger": False}
    trainer = L.Trainer(strategy=PipelineStrategy(stages=1, microbatches=2), callbacks=[monitor, last], **options)
    logging.getLogger("pipepart").addHandler(caplog.handler)
    try:
        trainer.fit(Module("mlp"), loader("mlp", 32, 8))
    finally:
        logging.getLogger("pipepart").removeHandler(caplog.handler)
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()
    assert set(monitor.files) == {"graph.json", "account.json"}
    said = [record.getMessage() for record in caplog.records if "could not be written" in record.getMessage()]
    assert len(said) == 3, said
    for name, reason in (("plan.json", "No space left"), ("trace.json", "Is a directory"), ("report.html", "No space")):
        assert sum(f"{name} could not be written: {reason}" in text for text in said) == 1, said
    assert not list(tmp_path.rglob("*.part"))
