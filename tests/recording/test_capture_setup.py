"""What recording does to a model is what one call of it does: hooks and flags that the first call sets, and no more."""

import copy

import pytest
import torch
from torch import nn

from pipepart.errors import CaptureError
from pipepart.recording import record

REGISTRIES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")


def state_of(model):
    """Flags and the number of hooks of each module."""
    return {
        path: (
            {key: value for key, value in vars(module).items() if isinstance(value, (bool, int, float, str))},
            [len(getattr(module, name)) for name in REGISTRIES],
        )
        for path, module in model.named_modules()
    }


def gradients(model, call, args, loss):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    loss(call(*args)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_one_call(model, args, loss):
    """Record `model` before its first call; it and the recording must be what a called copy is."""
    called = copy.deepcopy(model)
    expected = gradients(called, called, args, loss)
    again = gradients(called, called, args, loss)
    recording = record(model, args)
    assert state_of(model) == state_of(called)
    for call in (model, recording.module(), model):
        got = gradients(model, call, args, loss)
        for name, gradient in again.items():
            assert (gradient is None) == (got[name] is None), name
            assert gradient is None or torch.allclose(gradient, got[name], rtol=1e-6, atol=1e-9), name
    assert {name for name, g in expected.items() if g is None} == {name for name, g in again.items() if g is None}
    assert state_of(model) == state_of(called)


class LazyHooks(nn.Module):
    """Installs hooks on its layers in the first call, and sets a flag, public or private."""

    def __init__(self, flag):
        super().__init__()
        self.block, self.head, self.flag = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1), flag

    def forward(self, x):
        if not getattr(self, self.flag, False):
            setattr(self, self.flag, True)
            self.block[0].register_forward_hook(lambda module, args, out: out * 2)
            self.block.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        return self.head(self.block(x))


@pytest.mark.parametrize("flag", ["_ready", "ready"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_hooks_and_flags_of_the_first_call_are_kept_together(flag, wrapped):
    model = LazyHooks(flag).double()
    model = nn.Sequential(model) if wrapped else model
    assert_one_call(model, (torch.randn(3, 4, dtype=torch.float64),), lambda out: out.square().mean())


class KeepsDtype(nn.Module):
    """Keeps the dtype and the device of its first input."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(4, 4), None

    def forward(self, x):
        self.seen = (x.dtype, x.device)
        return self.layer(x)


def test_a_dtype_that_the_first_call_keeps_is_kept():
    model = KeepsDtype().double()
    x = torch.randn(3, 4, dtype=torch.float64)
    assert_one_call(model, (x,), lambda out: out.square().mean())
    assert model.seen == (x.dtype, x.device)


class HookEachCall(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        self.layer.register_forward_hook(lambda module, args, out: out + 1)
        return self.layer(x).sum()


def test_a_call_that_adds_a_hook_each_time_is_refused_and_leaves_the_model_alone():
    model = HookEachCall()
    before = state_of(model)
    with pytest.raises(CaptureError, match="adds or removes hooks of module 'layer'"):
        record(model, (torch.randn(2, 4),))
    assert state_of(model) == before


def transformers_models():
    transformers = pytest.importorskip("transformers")
    small = {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "image_size": 32,
        "patch_size": 8,
    }
    depth = {"backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8] * 4, "fusion_hidden_size": 8}
    return {
        "dpt": lambda: transformers.DPTForDepthEstimation(transformers.DPTConfig(**small, **depth, is_hybrid=False)),
        "dpt-segmentation": lambda: transformers.DPTForSemanticSegmentation(
            transformers.DPTConfig(**small, **depth, is_hybrid=False, num_labels=3, use_auxiliary_head=False)
        ),
        "vit": lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(**small, output_hidden_states=True, output_attentions=True)
        ),
        "beit": lambda: transformers.BeitModel(transformers.BeitConfig(**small, output_hidden_states=True)),
    }


@pytest.mark.parametrize(
    "name", ["vit", *(pytest.param(n, marks=pytest.mark.slow) for n in ("dpt", "dpt-segmentation", "beit"))]
)
def test_a_transformers_model_is_recorded_before_its_first_call(name):
    torch.manual_seed(0)
    model = transformers_models()[name]().double().train()

    def loss(out):
        return sum(v.square().mean() for v in out.values() if isinstance(v, torch.Tensor) and v.requires_grad)

    assert_one_call(model, (torch.randn(2, 3, 32, 32, dtype=torch.float64),), loss)
