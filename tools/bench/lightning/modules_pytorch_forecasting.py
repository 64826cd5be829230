"""Models of pytorch-forecasting: losses are objects of torchmetrics, and steps return dictionaries of logs."""

from __future__ import annotations

from typing import Any

from tools.bench.lightning.modules_case import Cases

__all__ = ["CASES", "load"]

CASES = Cases()


def load() -> None:
    """Import the library."""
    import pytorch_forecasting  # noqa: F401


def _data(covariates: bool, both_ends: bool) -> Any:
    import numpy as np
    import pandas as pd
    from pytorch_forecasting import TimeSeriesDataSet

    rng, length = np.random.default_rng(0), 30
    frames = [
        pd.DataFrame(
            {
                "series": str(number),
                "time": np.arange(length),
                "value": np.sin(np.arange(length) / 3) + number + rng.normal(0, 0.1, length),
                "price": rng.normal(0, 1, length),
            }
        )
        for number in range(6)
    ]
    more: dict[str, Any] = {"static_categoricals": ["series"], "time_varying_known_reals": ["price"]}
    return TimeSeriesDataSet(
        pd.concat(frames, ignore_index=True),
        time_idx="time",
        target="value",
        group_ids=["series"],
        min_encoder_length=8 if both_ends else 4,
        max_encoder_length=8,
        min_prediction_length=3,
        max_prediction_length=3,
        time_varying_unknown_reals=["value"],
        **(more if covariates else {}),
    )


def _train(model: str, options: dict[str, Any], loss: str, covariates: bool = True, both_ends: bool = True) -> None:
    import lightning.pytorch as pl
    import pytorch_forecasting as library
    from pytorch_forecasting import metrics, models

    data = _data(covariates, both_ends)
    kind = getattr(library, model, None) or getattr(models, model)
    module = kind.from_dataset(data, learning_rate=0.01, loss=getattr(metrics, loss)(), **options)
    trainer = pl.Trainer(gradient_clip_val=0.1)
    train, val = data.to_dataloader(train=True, batch_size=8), data.to_dataloader(train=False, batch_size=8)
    trainer.fit(module, train_dataloaders=train, val_dataloaders=val)


_TFT = {"hidden_size": 8, "attention_head_size": 2, "hidden_continuous_size": 4, "dropout": 0.0}
_CELL = {"hidden_size": 8, "rnn_layers": 2, "dropout": 0.0}


@CASES.add("pytorch_forecasting.tft")
def _tft() -> None:
    _train("TemporalFusionTransformer", _TFT, "QuantileLoss")


@CASES.add("pytorch_forecasting.tft_lengths", remark="encoder lengths from 4 to 8")
def _tft_lengths() -> None:
    _train("TemporalFusionTransformer", _TFT, "SMAPE", both_ends=False)


@CASES.add("pytorch_forecasting.nbeats")
def _nbeats() -> None:
    options = {
        "num_blocks": [1, 1],
        "num_block_layers": [2, 2],
        "widths": [8, 8],
        "dropout": 0.0,
        "backcast_loss_ratio": 0.1,
    }
    _train("NBeats", {**options, "expansion_coefficient_lengths": [3, 3]}, "MASE", covariates=False)


@CASES.add("pytorch_forecasting.nhits", draws=True, remark="without the dropout of its static encoder")
def _nhits() -> None:
    _train("NHiTS", {"hidden_size": 8, "dropout": 0.0}, "MAE")


@CASES.add("pytorch_forecasting.deepar", draws=True, remark="draws fixed: its validation samples")
def _deepar() -> None:
    _train("DeepAR", _CELL, "NormalDistributionLoss")


@CASES.add("pytorch_forecasting.recurrent")
def _recurrent() -> None:
    _train("RecurrentNetwork", {**_CELL, "cell_type": "GRU"}, "MAE")


@CASES.add("pytorch_forecasting.mlp")
def _mlp() -> None:
    _train("DecoderMLP", {"hidden_size": 16, "n_hidden_layers": 2, "dropout": 0.0}, "RMSE")


@CASES.add("pytorch_forecasting.tide")
def _tide() -> None:
    _train("TiDEModel", {"hidden_size": 16, "dropout": 0.0}, "MAE")
