"""Whole steps of a LightningModule: batches of every shape, counters, logs, metrics, and what is refused."""

import subprocess
import sys

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchmetrics
from support.environment import job_environment

from pipepart.errors import CaptureError
from pipepart.graph import op_graph
from pipepart.lightning.lightning_step import record_lightning_step
from pipepart.recording import GuardError, split
from tools.bench.zoo.detached import run_detached


class Base(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x):
        return self.net(x)


def pair(n):
    return torch.randn(n, 8), torch.randint(0, 4, (n,))


def named(n):
    x, y = pair(n)
    return {"x": x, "y": y}


def nested(n):
    x, y = pair(n)
    return {"views": [x, (x * 2, {"z": x + 1})], "y": y}


class TupleBatch(Base):
    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.loss(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss


class DictBatch(Base):
    def training_step(self, batch):
        out = self(batch["x"])
        loss = self.loss(out, batch["y"])
        self.log_dict({"loss": loss, "acc": (out.argmax(-1) == batch["y"]).float().mean()}, on_epoch=True)
        return {"loss": loss, "preds": out}


class NestedBatch(Base):
    def training_step(self, batch, batch_idx):
        a, (b, rest) = batch["views"]
        return self.loss(self(a) + self(b) + self(rest["z"]), batch["y"])


class Counters(Base):
    def training_step(self, batch, batch_idx):
        loss = self.loss(self(batch[0]), batch[1]) * (0.5 + self.global_step * 0.01) + self.trainer.current_epoch * 0.1
        loss = loss * (1.0 + 0.1 * batch_idx)
        self.log("warm", self.global_step * 0.01)
        self.log("size", float(len(batch[0])), batch_size=len(batch[0]))
        return loss


class Mixup(Base):
    def training_step(self, batch, batch_idx):
        x, y = batch
        lam = torch.distributions.Beta(0.4, 0.4).sample()
        order = torch.randperm(x.size(0))
        mixed = lam * x + (1 - lam) * x[order]
        with torch.no_grad():
            target = self(mixed).softmax(-1)
        out = self(mixed)
        return lam * self.loss(out, y) + (1 - lam) * self.loss(out, y[order]) + F.mse_loss(out.softmax(-1), target)


class Skipping(Base):
    def training_step(self, batch, batch_idx):
        loss = self.loss(self(batch[0]), batch[1])
        if torch.isnan(loss):
            return None
        self.log("item", loss.item())
        return loss


def logged(module, batch, numbers):
    """Run the real step with fixed counters and collect what it logs."""
    logs = {}
    kind = type(module)
    counters = {
        name: property(lambda self, name=name: numbers.get(name, 0)) for name in ("global_step", "current_epoch")
    }
    view = type("Trainer", (), {name: numbers.get(name, 0) for name in ("global_step", "current_epoch")})()
    module.__class__ = type(kind.__name__, (kind,), {**counters, "trainer": property(lambda self: view)})
    module.__dict__["log"] = lambda name, value, **options: logs.__setitem__(name, value)
    module.__dict__["log_dict"] = lambda values, **options: logs.update(values)
    try:
        args = (numbers.get("batch_idx", 0),) if module.training_step.__code__.co_argcount > 2 else ()
        out = module.training_step(batch, *args)
    finally:
        module.__class__ = kind
        del module.__dict__["log"], module.__dict__["log_dict"]
    return out, logs


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        (TupleBatch, pair),
        (TupleBatch, lambda n: list(pair(n))),
        (DictBatch, named),
        (NestedBatch, nested),
        (Counters, pair),
        (Mixup, pair),
        (Skipping, pair),
    ],
)
@pytest.mark.parametrize("numbers", [{}, {"batch_idx": 3, "global_step": 50, "current_epoch": 2}])
def test_step_equals_the_original(kind, make, numbers):
    module = kind()
    recording = record_lightning_step(module, "training_step", make(6))
    body = recording.graph_module()
    for size in (6, 9):
        batch = make(size)
        torch.manual_seed(1)
        wanted, logs = logged(module, batch, numbers)
        torch.manual_seed(1)
        flat = body(*recording.flatten((batch,), numbers))
        got = recording.unflatten(flat)
        torch.testing.assert_close(got, wanted)
        module.zero_grad()
        (wanted["loss"] if isinstance(wanted, dict) else wanted).backward()
        grads = [p.grad.clone() for p in module.parameters()]
        module.zero_grad()
        flat[recording.loss_index].backward()
        for parameter, grad in zip(module.parameters(), grads):
            torch.testing.assert_close(parameter.grad, grad)
        assert [log.name for log in recording.extras] == list(logs)
        for log in recording.extras:
            value = log.value if log.output is None else flat[log.output]
            torch.testing.assert_close(torch.as_tensor(value), torch.as_tensor(logs[log.name]), check_dtype=False)


def test_log_options_are_kept_and_a_batch_size_is_not_baked_in():
    recording = record_lightning_step(TupleBatch(), "training_step", pair(6))
    assert recording.extras[0].about == {"prog_bar": True}
    sizes = {log.name: log for log in record_lightning_step(Counters(), "training_step", pair(6)).extras}
    assert sizes["size"].about == {}


def test_numbers_are_inputs_with_their_names():
    recording = record_lightning_step(Counters(), "training_step", pair(6), dataloader_idx=0)
    names = [spec.name for spec in recording.inputs if spec.kind == "number"]
    assert names == ["batch_idx", "dataloader_idx", "global_step", "current_epoch"]
    assert recording.flatten((pair(4),), {"global_step": 7})[2:] == [0, 0, 7, 0]
    with pytest.raises(CaptureError, match="unknown numbers"):
        recording.flatten((pair(4),), {"epoch": 7})


def test_python_decision_on_a_counter_is_guarded():
    class Every(Base):
        def training_step(self, batch, batch_idx):
            loss = self.loss(self(batch[0]), batch[1])
            if batch_idx % 2 == 0:
                self.log("even", loss)
            return loss

    recording = record_lightning_step(Every(), "training_step", pair(6))
    body = recording.graph_module()
    body(*recording.flatten((pair(6),), {"batch_idx": 4}))
    with pytest.raises(GuardError, match=r"test_capture_step\.py:\d+"):
        body(*recording.flatten((pair(6),), {"batch_idx": 3}))


def test_numbers_of_a_batch_inside_of_numpy_are_guarded():
    """A position of a column in the batch, put into an array of positions (neuralforecast)."""

    class Columns(Base):
        def training_step(self, batch, batch_idx):
            positions = np.append(batch["position"], [0])
            return self.net[0](batch["x"])[:, positions].square().mean() * (np.float64(1.0) + batch_idx)

    module = Columns()
    recording = record_lightning_step(module, "training_step", {"x": pair(4)[0], "position": 1})
    body = recording.graph_module()
    x = pair(6)[0]
    (loss,) = body(*recording.flatten(({"x": x, "position": 1},), {"batch_idx": 2}))
    torch.testing.assert_close(loss, module.training_step({"x": x, "position": 1}, 2))
    with pytest.raises(GuardError):
        body(*recording.flatten(({"x": x, "position": 2},), {"batch_idx": 2}))


def test_metrics_update_when_the_recorded_step_runs():
    class Metrics(Base):
        def __init__(self):
            super().__init__()
            self.acc = torchmetrics.Accuracy(task="multiclass", num_classes=4)
            self.f1 = torchmetrics.F1Score(task="multiclass", num_classes=4)

        def training_step(self, batch, batch_idx):
            out = self(batch[0])
            self.log("acc", self.acc(out.softmax(-1), batch[1]))
            self.f1.update(out, batch[1])
            self.log("f1", self.f1, on_epoch=True)
            return self.loss(out, batch[1])

    module = Metrics()
    recording = record_lightning_step(module, "training_step", pair(6))
    assert module.acc.update_count == 0
    assert int(module.acc.tp.sum()) == 0
    assert recording.extras[1].value is module.f1
    graph = op_graph(recording)
    chunks = split(recording, graph.chunks_at([3]), 2)
    for _ in range(3):
        run_detached(recording, chunks, recording.flatten((pair(6),)))
    assert module.acc.update_count == module.f1.update_count == 3
    assert int((module.acc.tp + module.acc.fn).sum()) == 18


@pytest.mark.parametrize("step", ["validation_step", "test_step", "predict_step"])
def test_other_steps(step):
    class Steps(Base):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            out = self(batch[0])
            self.log("val", self.loss(out, batch[1]))
            return out

        test_step = validation_step

        def predict_step(self, batch, batch_idx):
            return {"probabilities": self(batch[0]).softmax(-1)}

    module = Steps().eval()
    recording = record_lightning_step(module, step, pair(6))
    assert not recording.training
    batch = pair(5)
    out = recording.unflatten(recording.graph_module()(*recording.flatten((batch,))))
    wanted = module(batch[0])
    torch.testing.assert_close(
        out["probabilities"] if step == "predict_step" else out,
        wanted.softmax(-1) if step == "predict_step" else wanted,
    )


def test_names_of_samples_may_change():
    class Named(Base):
        def training_step(self, batch):
            return self.loss(self(batch["x"]), batch["y"]) * batch["weight"]

    recording = record_lightning_step(Named(), "training_step", {**named(6), "names": ["a"] * 6, "weight": 0.5})
    batch = {**named(4), "names": ["b", "c", "d", "e"], "weight": 0.25}
    assert recording.graph_module()(*recording.flatten((batch,)))[0].requires_grad

    class Deciding(Base):
        def training_step(self, batch):
            return self.loss(self(batch["x"]), batch["y"]) * (2 if batch["kind"] == "a" else 1)

    recording = record_lightning_step(Deciding(), "training_step", {**named(6), "kind": "a"})
    with pytest.raises(GuardError, match="batch\\['kind'\\]"):
        recording.flatten(({**named(6), "kind": "b"},))


def refused(body, setup=lambda self: None):
    class Refused(Base):
        def __init__(self):
            super().__init__()
            self.outputs, self.count = [], 0
            setup(self)

        def training_step(self, batch, batch_idx):
            return body(self, batch, self.loss(self(batch[0]), batch[1]))

    return Refused()


def appends(self, batch, loss):
    self.outputs.append(loss.detach())
    return loss


def counts(self, batch, loss):
    self.count += 1
    return loss * self.count


def steps_itself(self, batch, loss):
    self.manual_backward(loss)
    return loss


def reads_rate(self, batch, loss):
    self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])
    return loss


def draws_outside(self, batch, loss):
    import random

    return loss * random.random()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (appends, "outputs"),
        (counts, "count"),
        (steps_itself, "manual_backward"),
        (draws_outside, "outside torch"),
        (lambda self, batch, loss: {"other": loss.detach()}, "no loss"),
    ],
)
def test_what_cannot_be_recorded_is_refused_with_its_reason(body, words):
    with pytest.raises(CaptureError, match=words):
        record_lightning_step(refused(body), "training_step", pair(6))


def test_manual_optimization_is_refused():
    def manual(self):
        self.automatic_optimization = False

    with pytest.raises(CaptureError, match="automatic_optimization"):
        record_lightning_step(refused(appends, manual), "training_step", pair(6))


OTHER_NAMESPACE = """
import sys
import pytorch_lightning
import torch
import pipepart

class Model(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).square().mean() * (1 + self.global_step)
        self.log("loss", loss)
        return loss

assert "lightning.pytorch" not in sys.modules
recording = pipepart.capture(Model().training_step, (torch.randn(6, 8), 0)).train
print(recording.step, [spec.name for spec in recording.inputs], [extra.name for extra in recording.extras])
"""


@pytest.mark.slow
def test_a_step_of_the_other_namespace_is_captured_as_a_step():
    """`pytorch_lightning` is a package of its own: nothing has imported the strategy when its step is captured."""
    pytest.importorskip("pytorch_lightning")
    words = [sys.executable, "-W", "ignore", "-c", OTHER_NAMESPACE]
    done = subprocess.run(words, env=job_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "training_step ['batch', 'batch_idx', 'global_step', 'current_epoch'] ['loss']\n"


def test_a_counter_that_is_no_number_counts_as_zero():
    class Counts(Base):
        @property
        def global_step(self):
            raise RuntimeError("no trainer")

        def training_step(self, batch):
            return self.loss(self(batch[0]), batch[1]) * (1 + self.current_epoch)

    recording = record_lightning_step(Counts(), "training_step", pair(6))
    assert recording.flatten((pair(6),), {"current_epoch": 2})[2:] == [0, 0, 2]
