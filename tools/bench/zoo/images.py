"""timm models, small: few classes, small images, and no block twice in a row that is built like the one before.

timm needs torchvision for data only: a stub stands in.
"""

from __future__ import annotations

import dataclasses
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


OPTIONS: dict[str, dict[str, Any]] = {
    "densenet121": {"block_config": (2, 2, 2, 2)},
    "dpn48b": {"k_sec": (1, 1, 2, 1)},
    "nf_resnet26": {"channels": (64, 128, 256, 512)},
    "nfnet_l0": {"channels": (64, 128, 192, 192), "group_size": 16},
    "rexnet_100": {"depth_mult": 0.5},
    "vgg11_bn": {"mlp_ratio": 1 / 16},
    "vovnet39a": {"stage_conv_chs": [32, 40, 48, 56], "stage_out_chs": [64, 128, 192, 256], "layer_per_block": 3},
}
"""Smaller where a model is wide, or deep in a way that no block repeats another."""

LEFT_OUT = {"inception_v3": ("Mixed_5d", "Mixed_6c", "Mixed_6d", "Mixed_6e", "Mixed_7c")}
"""Blocks that keep the width and are no members of a list."""

SIZES = {"inception_v3": 75, "crossvit_tiny_240": 240, "efficientformer_l1": 224}
"""Images other than of 64 pixels; some models know one size, some need a least one."""


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


def shorten(model: nn.Module) -> None:
    """Leave out blocks, or pairs of them, that are built like those before: a stage keeps its first and one more."""
    for module in list(model.modules()):
        if not isinstance(module, (nn.Sequential, nn.ModuleList)):
            continue
        kept: list[tuple[str, nn.Module, Any]] = []
        for name, block in module.named_children():
            kept.append((name, block, _anatomy(block)))
            for period in (1, 2):
                built = [anatomy for _, _, anatomy in kept]
                if len(built) >= 2 * period and built[-period:] == built[-2 * period : -period]:
                    del kept[-period:]
        names = [str(i) if isinstance(module, nn.ModuleList) else name for i, (name, _, _) in enumerate(kept)]
        module._modules.clear()
        module._modules.update(zip(names, (block for _, block, _ in kept)))


def _anatomy(block: nn.Module) -> Any:
    """What a block is made of: classes, shapes of parameters, strides. Something of its own for less than a block."""
    leaves = [part for part in block.modules() if part._parameters]
    if len(leaves) < 3:
        return block
    return [
        (type(part), [p is not None and p.shape for p in part._parameters.values()], getattr(part, "stride", None))
        for part in leaves
    ]


def _create(name: str, options: dict[str, Any]) -> nn.Module:
    """A timm model; those whose depth and width are no options of `create_model` are made of their classes."""
    import timm
    from timm.models import byobnet, ghostnet, hrnet, mvitv2, selecsls

    if name == "mvitv2_tiny":
        cfg = dataclasses.replace(mvitv2.model_cfgs[name], depths=(1, 1, 1, 1))
        return mvitv2.MultiScaleVit(cfg, img_size=64, num_classes=10, drop_rate=0.1)
    if name == "hrnet_w18_small":
        stages = {key: dict(value) for key, value in hrnet.cfg_cls[name].items() if isinstance(value, dict)}
        for stage in stages.values():
            stage["num_blocks"] = tuple(1 for _ in stage["num_blocks"])
            stage["num_channels"] = tuple(width // 2 for width in stage["num_channels"])
        return hrnet.HighResolutionNet({"stem_width": 32, **stages}, num_classes=10, drop_rate=0.1)
    if name == "ghostnetv2_100":
        stages = [stage[:1] for stage in timm.create_model(name).cfgs[:7]]
        return ghostnet.GhostNet(stages, num_classes=10, drop_rate=0.1, version="v2")
    if name == "selecsls42b":
        features = [(32, 0, 32, 32, True, 2), (32, 32, 32, 48, False, 1), (48, 0, 48, 48, True, 2)]
        head = [(48, 64, 3, 2), (64, 64, 3, 1)]
        info = [{"num_chs": 32, "reduction": 2, "module": "stem.2"}]
        cfg = {"block": selecsls.SelecSlsBlock, "features": features, "head": head, "num_features": 64}
        return selecsls.SelecSls({**cfg, "feature_info": info}, num_classes=10, drop_rate=0.1)
    if name == "mobileone_s0":
        options["blocks"] = [stage[:2] for stage in byobnet.model_cfgs[name].blocks]
    try:
        model = timm.create_model(name, drop_rate=0.1, **options)
    except TypeError:
        model = timm.create_model(name, **options)
    for block in LEFT_OUT.get(name, ()):
        setattr(model, block, nn.Identity())
    return model


def _build(name: str) -> Callable[[], tuple[nn.Module, Callable[[int], tuple[torch.Tensor, ...]]]]:
    def build() -> tuple[nn.Module, Callable[[int], tuple[torch.Tensor, ...]]]:
        stub_torchvision()
        import timm

        options: dict[str, Any] = {"pretrained": False, "num_classes": 10, **OPTIONS.get(name, {})}
        settings = timm.get_pretrained_cfg(name)
        size = SIZES.get(name, 64)
        if settings.fixed_input_size and name not in SIZES:
            options["img_size"] = size
        model = _create(name, options)
        shorten(model)
        return Classifier(model), lambda batch: (torch.randn(batch, 3, size, size), torch.randint(0, 10, (batch,)))

    return build


ARCHITECTURES = {name: _build(name) for name in NAMES}
