"""Message passing networks of chemprop: batches of molecules, metric objects as losses, a schedule by steps."""

from __future__ import annotations

from typing import Any

from tools.bench.lightning.modules_case import Cases

__all__ = ["CASES", "load"]

CASES = Cases()
_SINGLE: dict[str, Any] = {"trainer": {"precision": "32-true"}, "relative": 1e-4}
"""Features of molecules are of single precision."""
_MOLECULES = [
    "CCO",
    "c1ccccc1",
    "CC(=O)O",
    "CCN",
    "CCCl",
    "C1CCCCC1",
    "CC#N",
    "c1ccncc1",
    "COC",
    "CCBr",
    "CC=O",
    "OCCO",
]


def load() -> None:
    """Import the library."""
    import chemprop  # noqa: F401


def _train(
    predictor: str,
    targets: Any,
    passing: str = "BondMessagePassing",
    agg: str = "MeanAggregation",
    batch_norm: bool = False,
    **options: Any,
) -> None:
    import lightning.pytorch as pl
    from chemprop import data, models, nn

    points = [data.MoleculeDatapoint.from_smi(smiles, y) for smiles, y in zip(_MOLECULES, targets)]
    loader = data.build_dataloader(data.MoleculeDataset(points), batch_size=4, shuffle=False, num_workers=0)
    module = models.MPNN(
        getattr(nn, passing)(d_h=16, depth=3),
        getattr(nn, agg)(),
        getattr(nn, predictor)(input_dim=16, hidden_dim=16, n_layers=2, **options),
        batch_norm=batch_norm,
        warmup_epochs=1,
    )
    pl.Trainer().fit(module, loader, loader)


def _numbers(tasks: int) -> Any:
    import numpy as np

    return np.random.default_rng(0).normal(size=(len(_MOLECULES), tasks))


@CASES.add("chemprop.regression", **_SINGLE)
def _regression() -> None:
    _train("RegressionFFN", _numbers(1))


@CASES.add("chemprop.missing_targets", **_SINGLE)
def _missing() -> None:
    targets = _numbers(3)
    targets[::3, 1] = float("nan")
    _train("RegressionFFN", targets, agg="NormAggregation", n_tasks=3)


@CASES.add("chemprop.atoms", **_SINGLE)
def _atoms() -> None:
    _train("RegressionFFN", _numbers(1), passing="AtomMessagePassing", agg="SumAggregation")


@CASES.add("chemprop.classification", **_SINGLE)
def _classification() -> None:
    _train("BinaryClassificationFFN", (_numbers(1) > 0).astype(float))


@CASES.add("chemprop.multiclass", **_SINGLE)
def _multiclass() -> None:
    import numpy as np

    _train("MulticlassClassificationFFN", np.arange(len(_MOLECULES))[:, None] % 3.0, n_classes=3)


@CASES.add("chemprop.mean_and_variance", **_SINGLE)
def _mve() -> None:
    _train("MveFFN", _numbers(1))


@CASES.add("chemprop.batch_norm", microbatches=1, remark="microbatches=1: batch norm", **_SINGLE)
def _batch_norm() -> None:
    _train("RegressionFFN", _numbers(1), batch_norm=True)
