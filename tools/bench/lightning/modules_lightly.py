"""Self-supervised learning with lightly: its classifiers, and modules as its documentation builds them from its parts."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

from tools.bench.lightning.modules_case import Cases
from tools.bench.zoo.images import stub_torchvision

__all__ = ["CASES", "load"]

CASES = Cases()
_STATISTICS = {"microbatches": 1, "remark": "microbatches=1: batch norm"}


def load() -> None:
    """Import the library, which needs torchvision for data only: a stub stands in."""
    importlib.import_module("pytorch_lightning")  # it and torchmetrics ask whether torchvision is there
    stub_torchvision()
    import lightly.loss
    import lightly.models.modules
    import lightly.utils.benchmarking  # noqa: F401


def _backbone() -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


def _loader(views: int) -> Any:
    import torch
    from torch.utils.data import DataLoader

    made = torch.Generator().manual_seed(0)
    images = torch.randn(32, views, 3, 16, 16, generator=made)
    samples = [([*image] if views > 1 else image[0], number % 4) for number, image in enumerate(images)]
    return DataLoader(samples, batch_size=8, shuffle=True)


def _fit(
    step: Callable[[Any, list[Any]], Any], parts: dict[str, Any], before: Callable[[Any], None] | None = None
) -> None:
    """Train a module that has `parts` and computes its loss by ``step(module, views)``."""
    import pytorch_lightning as pl
    import torch

    class SelfSupervised(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if before is not None:
                before(self)
            loss = step(self, batch[0])
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.06)

    pl.Trainer().fit(SelfSupervised(), _loader(2))


def _frozen_copy(part: Any) -> Any:
    copied = copy.deepcopy(part)
    for parameter in copied.parameters():
        parameter.requires_grad = False
    return copied


@CASES.add("lightly.simclr", **_STATISTICS)
def _simclr() -> None:
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead

    def step(module: Any, views: list[Any]) -> Any:
        return module.criterion(*(module.head(module.backbone(view)) for view in views))

    _fit(step, {"backbone": _backbone(), "head": SimCLRProjectionHead(16, 16, 8), "criterion": NTXentLoss()})


@CASES.add("lightly.simsiam", **_STATISTICS)
def _simsiam() -> None:
    from lightly.loss import NegativeCosineSimilarity
    from lightly.models.modules import SimSiamPredictionHead, SimSiamProjectionHead

    def step(module: Any, views: list[Any]) -> Any:
        z0, z1 = (module.projection(module.backbone(view)) for view in views)
        p0, p1 = module.prediction(z0), module.prediction(z1)
        return 0.5 * (module.criterion(z0.detach(), p1) + module.criterion(z1.detach(), p0))

    projection, prediction = SimSiamProjectionHead(16, 16, 8), SimSiamPredictionHead(8, 4, 8)
    _fit(step, {"backbone": _backbone(), "projection": projection, "prediction": prediction,
                "criterion": NegativeCosineSimilarity()})  # fmt: skip


def _two_losses(name: str, head: str) -> Callable[[], None]:
    def program() -> None:
        from lightly import loss
        from lightly.models.modules import heads

        def step(module: Any, views: list[Any]) -> Any:
            return module.criterion(*(module.head(module.backbone(view)) for view in views))

        parts = {"backbone": _backbone(), "head": getattr(heads, head)(16, 16, 8), "criterion": getattr(loss, name)()}
        _fit(step, parts)

    return program


CASES.add("lightly.barlow_twins", **_STATISTICS)(_two_losses("BarlowTwinsLoss", "BarlowTwinsProjectionHead"))
CASES.add("lightly.vicreg", **_STATISTICS)(_two_losses("VICRegLoss", "VICRegProjectionHead"))


@CASES.add("lightly.byol", **_STATISTICS)
def _byol() -> None:
    from lightly.loss import NegativeCosineSimilarity
    from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
    from lightly.models.utils import update_momentum

    def before(module: Any) -> None:
        update_momentum(module.backbone, module.slow_backbone, m=0.99)
        update_momentum(module.projection, module.slow_projection, m=0.99)

    def step(module: Any, views: list[Any]) -> Any:
        fast = [module.prediction(module.projection(module.backbone(view))) for view in views]
        slow = [module.slow_projection(module.slow_backbone(view)).detach() for view in views]
        return 0.5 * (module.criterion(fast[0], slow[1]) + module.criterion(fast[1], slow[0]))

    backbone, projection = _backbone(), BYOLProjectionHead(16, 16, 8)
    _fit(step, {"backbone": backbone, "projection": projection, "prediction": BYOLPredictionHead(8, 16, 8),
                "slow_backbone": _frozen_copy(backbone), "slow_projection": _frozen_copy(projection),
                "criterion": NegativeCosineSimilarity()}, before)  # fmt: skip


@CASES.add("lightly.moco", **_STATISTICS)
def _moco() -> None:
    from lightly.loss import NTXentLoss
    from lightly.models.modules import MoCoProjectionHead
    from lightly.models.utils import update_momentum

    def before(module: Any) -> None:
        update_momentum(module.backbone, module.slow_backbone, m=0.99)
        update_momentum(module.head, module.slow_head, m=0.99)

    def step(module: Any, views: list[Any]) -> Any:
        query = module.head(module.backbone(views[0]))
        return module.criterion(query, module.slow_head(module.slow_backbone(views[1])).detach())

    backbone, head = _backbone(), MoCoProjectionHead(16, 16, 8)
    _fit(step, {"backbone": backbone, "head": head, "slow_backbone": _frozen_copy(backbone),
                "slow_head": _frozen_copy(head), "criterion": NTXentLoss(memory_bank_size=(64, 8))}, before)  # fmt: skip


@CASES.add("lightly.dino", **_STATISTICS)
def _dino() -> None:
    from lightly.loss import DINOLoss
    from lightly.models.modules import DINOProjectionHead
    from lightly.models.utils import update_momentum

    def before(module: Any) -> None:
        update_momentum(module.backbone, module.slow_backbone, m=0.99)
        update_momentum(module.head, module.slow_head, m=0.99)

    def step(module: Any, views: list[Any]) -> Any:
        teacher = [module.slow_head(module.slow_backbone(view)) for view in views]
        student = [module.head(module.backbone(view)) for view in views]
        return module.criterion(teacher, student, epoch=module.current_epoch)

    backbone, head = _backbone(), DINOProjectionHead(16, 16, 8, 32, freeze_last_layer=1)
    slow = DINOProjectionHead(16, 16, 8, 32)
    for parameter in slow.parameters():
        parameter.requires_grad = False
    _fit(step, {"backbone": backbone, "head": head, "slow_backbone": _frozen_copy(backbone), "slow_head": slow,
                "criterion": DINOLoss(output_dim=32, warmup_teacher_temp_epochs=5)}, before)  # fmt: skip


def _classify(name: str) -> Callable[[], None]:
    def program() -> None:
        import pytorch_lightning as pl
        from lightly.utils import benchmarking

        module = getattr(benchmarking, name)(
            _backbone(), batch_size_per_device=8, feature_dim=16, num_classes=4, topk=(1, 2)
        )
        pl.Trainer().fit(module, _loader(1), _loader(1))

    return program


CASES.add("lightly.linear_classifier", **_STATISTICS)(_classify("LinearClassifier"))
CASES.add("lightly.finetune_classifier", **_STATISTICS)(_classify("FinetuneClassifier"))


@CASES.add("lightly.online_classifier", **_STATISTICS)
def _online() -> None:
    import pytorch_lightning as pl
    import torch
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead
    from lightly.utils.benchmarking import OnlineLinearClassifier

    class WithClassifier(pl.LightningModule):
        """SimCLR with the classifier of the library beside it, whose loss is added."""

        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = _backbone(), SimCLRProjectionHead(16, 16, 8)
            self.criterion = NTXentLoss()
            self.classifier = OnlineLinearClassifier(feature_dim=16, num_classes=4, topk=(1, 2))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            views, targets = batch[0], batch[1]
            features = [self.backbone(view) for view in views]
            loss = self.criterion(*(self.head(one) for one in features))
            self.log("train_loss", loss, prog_bar=True, sync_dist=True, batch_size=len(targets))
            class_loss, class_logs = self.classifier.training_step((features[0].detach(), targets), batch_idx)
            self.log_dict(class_logs, sync_dist=True, batch_size=len(targets))
            return loss + class_loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.06)

    pl.Trainer().fit(WithClassifier(), _loader(2))
