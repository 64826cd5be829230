"""timm models, unchanged but for the number of classes. timm needs torchvision for data only: a stub stands in."""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

__all__ = ["ARCHITECTURES"]

NAMES = [
    "resnet18", "resnetv2_50", "resnext50_32x4d", "seresnet50", "res2net50_26w_4s", "resnest14d",
    "ecaresnet26t", "skresnet18", "densenet121", "dla34", "vgg11_bn", "inception_v3", "mobilenetv2_050",
    "mobilenetv3_small_050", "mobilenetv4_conv_small_035", "efficientnet_b0", "efficientnetv2_rw_t",
    "tf_efficientnet_lite0", "ghostnet_050", "ghostnetv2_100", "hrnet_w18_small", "regnetx_002", "regnety_002",
    "repvgg_a0", "rexnet_100", "selecsls42b", "semnasnet_075", "spnasnet_100", "mnasnet_small", "fbnetc_100",
    "hardcorenas_a", "tinynet_e", "lcnet_035", "cspresnet50", "cspdarknet53", "darknet53", "dpn48b", "nfnet_l0",
    "nf_resnet26", "gernet_s", "botnet26t_256", "convnext_atto", "convnextv2_atto", "mixer_s32_224",
    "gmlp_ti16_224", "resmlp_12_224", "vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224",
    "deit3_small_patch16_224", "eva02_tiny_patch14_224", "cait_xxs24_224", "xcit_nano_12_p16_224", "pit_ti_224",
    "twins_pcpvt_small", "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "coat_tiny",
    "coatnet_nano_rw_224", "crossvit_tiny_240", "convit_tiny", "levit_128s", "volo_d1_224", "visformer_tiny",
    "poolformer_s12", "pvt_v2_b0", "mvitv2_tiny", "edgenext_xx_small", "efficientformer_l1", "fastvit_t8",
    "focalnet_tiny_srf", "hiera_tiny_224", "mobileone_s0", "mobilevit_xxs", "mobilevitv2_050", "repvit_m0_9",
    "vovnet39a",
]  # fmt: skip


class Classifier(nn.Module):
    """A model with its cross entropy."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(image), label)


def stub_torchvision() -> None:
    """Register empty torchvision modules, so that timm can be imported without it."""
    if "torchvision" in sys.modules:
        return

    def make(name: str) -> types.ModuleType:
        module = types.ModuleType(name)
        module.__path__ = []  # type: ignore[attr-defined]

        def attribute(key: str) -> Any:
            if key.startswith("__"):
                raise AttributeError(key)
            return type(key, (nn.Module,), {})

        module.__getattr__ = attribute  # type: ignore[method-assign]
        sys.modules[name] = module
        return module

    for part in ("", ".ops", ".ops.misc", ".models", ".transforms", ".transforms.functional", ".datasets", ".utils"):
        make(f"torchvision{part}")
    transforms: Any = sys.modules["torchvision.transforms"]
    functional: Any = sys.modules["torchvision.transforms.functional"]
    transforms.functional = functional
    functional.InterpolationMode = enum.Enum("InterpolationMode", "NEAREST BILINEAR BICUBIC BOX HAMMING LANCZOS")
    package: Any = sys.modules["torchvision"]
    package.transforms = transforms


def _build(name: str) -> Callable[[], tuple[nn.Module, Callable[[int], tuple[torch.Tensor, ...]]]]:
    def build() -> tuple[nn.Module, Callable[[int], tuple[torch.Tensor, ...]]]:
        stub_torchvision()
        import timm

        options: dict[str, Any] = {"pretrained": False, "num_classes": 10}
        settings = timm.get_pretrained_cfg(name)
        size = settings.input_size[-1]
        if not settings.fixed_input_size:
            size = 139 if name.startswith("inception") else 64
        elif name not in ("crossvit_tiny_240", "efficientformer_l1"):  # these know one size
            size = options["img_size"] = 64
        try:
            model = timm.create_model(name, drop_rate=0.1, **options)
        except TypeError:
            model = timm.create_model(name, **options)
        return Classifier(model), lambda batch: (torch.randn(batch, 3, size, size), torch.randint(0, 10, (batch,)))

    return build


ARCHITECTURES = {name: _build(name) for name in NAMES}
