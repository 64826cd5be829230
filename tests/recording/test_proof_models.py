"""The proof on models as they come: what escapes the recorder is refused, and the model is left as it was."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipepart.errors import CaptureError
from pipepart.lightning.lightning_step import record_lightning_step
from pipepart.recording import prove, record
from pipepart.recording.proof import outcome


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


escaping = torch._C._FunctionBase.__dict__["apply"].__get__(None, Reversal)
"""The entry in C itself, which nothing can be put in front of."""


class Escaping(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        h = self.before(x).tanh()
        return self.after(escaping(h)).mean()


class View(Reversal):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)


class EscapingView(Escaping):
    apply = staticmethod(torch._C._FunctionBase.__dict__["apply"].__get__(None, View))

    def forward(self, x):
        return self.after(self.apply(self.before(x).tanh())).mean()


class EscapingStep(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Escaping()

    def training_step(self, batch, batch_idx):
        return self.model(batch)

    validation_step = training_step


@pytest.mark.parametrize(("model", "op"), [(Escaping(), "mul"), (EscapingView(), "view_as")])
def test_what_escapes_the_recorder_is_refused_with_op_module_and_line(model, op):
    model, x = model.double(), torch.randn(3, 4, dtype=torch.float64)
    with pytest.raises(CaptureError, match=rf"op {op} \(module '' at test_proof_models.py:\d+\)") as caught:
        record(model, (x,))
    assert "gradient of before.weight is missing" in str(caught.value)


def test_the_same_in_a_step_and_nothing_in_an_evaluation():
    module, x = EscapingStep().double(), torch.randn(3, 4, dtype=torch.float64)
    with pytest.raises(CaptureError, match=r"op mul \(module 'model' at test_proof_models.py"):
        record_lightning_step(module, "training_step", x)
    module.eval()
    record_lightning_step(module, "validation_step", x)


def test_without_a_loss_every_output_is_a_start_of_backward():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 2)

        def forward(self, x):
            return {"a": self.a(x), "b": escaping(self.b(x) * 2), "c": x.argmax(1)}

    with pytest.raises(CaptureError, match=r"gradient of b.weight is missing"):
        record(Two(), (torch.randn(3, 4),))


class Watched(nn.Module):
    """Has hooks on its parameters, and gradients already."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen = []
        self.layer.weight.register_hook(lambda gradient: self.seen.append(1) or gradient * 2)
        self.layer.weight.register_post_accumulate_grad_hook(lambda p: self.seen.append(2))
        self.layer.weight.grad = torch.ones(4, 4)

    def forward(self, x):
        return self.layer(x).square().mean()


def test_hooks_of_parameters_do_not_run_and_gradients_stay():
    model = Watched()
    gradient = model.layer.weight.grad
    record(model, (torch.randn(3, 4),))
    assert model.seen == [] and model.layer.weight.grad is gradient and bool((gradient == 1).all())
    model(torch.randn(3, 4)).backward()
    assert model.seen == [1, 2]


class Reentrant(nn.Module):
    """Reentrant checkpointing inside a module that is kept whole."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.block = Block()

    def forward(self, x):
        return self.last(self.block(self.first(x))).square().mean()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        if x.sum() > 1e9:
            return x
        return checkpoint(self.layer, x, use_reentrant=True)


def sparse(x=None):
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 4, sparse=True)

        def forward(self, x):
            return self.table(x).square().mean()

    return Sparse(), torch.randint(0, 10, (3, 2))


def of_complex_numbers():
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

        def forward(self, x):
            return torch.fft.rfft(x, n=6) @ self.weight

    return Complex(), torch.randn(3, 6)


def in_half(dtype):
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8)).to(dtype)
    return model, torch.randn(4, 8, dtype=dtype)


def bias_before_norm():
    """The gradient of the bias is a sum that cancels: nothing but rounding errors."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()), torch.randn(4, 3, 6, 6)


MODELS = {
    "reentrant": lambda: (Reentrant(), torch.randn(3, 4)),
    "sparse": sparse,
    "complex": of_complex_numbers,
    "bfloat16": lambda: in_half(torch.bfloat16),
    "float16": lambda: in_half(torch.float16),
    "bias before norm": bias_before_norm,
    "lstm": lambda: (nn.LSTM(4, 5, 2, dropout=0.3, batch_first=True), torch.randn(3, 6, 4)),
    "nothing to train": lambda: (nn.Sequential(nn.ReLU(), nn.Softmax(-1)), torch.randn(3, 4)),
    "frozen": lambda: (nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2)), torch.randn(3, 4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_sound_models_are_proved(name):
    model, x = MODELS[name]()
    recording = record(model, (x,))
    assert not [note for note in recording.notes if "not proved" in note or "itself" in note]
    assert prove(recording, model, (x,)) == ()


def test_large_gradients_are_compared_by_their_sums(monkeypatch):
    monkeypatch.setattr(outcome, "_LARGE", 1000)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)).double(), torch.randn(5, 64).double()
    recording = record(model, (x,))
    assert outcome.compact(model[0].weight).numel() < 1100 + 64
    tanh = next(node for node in recording.ops if node.name == "_1")
    with recording.graph.inserting_after(tanh):
        new = recording.graph.call_function(_row_lost, (tanh,))
    new.meta = dict(tanh.meta)
    tanh.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    with pytest.raises(CaptureError, match=r"gradient of 0.weight"):
        prove(recording, model, (x,))


def _row_lost(x):
    return torch.cat([x[:, :1].detach(), x[:, 1:]], 1)
