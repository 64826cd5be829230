"""Estimators of GluonTS, which make their module, their trainer and a stream of random windows themselves."""

from __future__ import annotations

from typing import Any

from tools.bench.lightning.modules_case import Cases

__all__ = ["CASES", "load"]

CASES = Cases()


def load() -> None:
    """Import the library."""
    import gluonts.torch.model.deepar
    import gluonts.torch.model.tft  # noqa: F401


def _train(name: str, options: dict[str, Any], several: bool = False) -> None:
    import numpy as np
    from gluonts import torch as models
    from gluonts.dataset.common import ListDataset
    from gluonts.torch.model import i_transformer

    rng = np.random.default_rng(0)
    size = (3, 80) if several else (80,)
    entries = [{"target": rng.normal(5, 1, size), "start": "2024-01-01 00:00"} for _ in range(12)]
    data = ListDataset(entries, freq="h", one_dim_target=not several)
    known = {"ITransformerEstimator": i_transformer}.get(name, models)
    estimator = getattr(known, name)(prediction_length=4, batch_size=8, num_batches_per_epoch=4, **options)
    estimator.train(data, validation_data=data)


_SMALL = {"context_length": 8}
_ENCODER = {**_SMALL, "d_model": 16, "nhead": 2, "dim_feedforward": 16, "dropout": 0.0}
_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "feedforward": ("SimpleFeedForwardEstimator", {**_SMALL, "hidden_dimensions": [16, 16]}),
    "dlinear": ("DLinearEstimator", {**_SMALL, "hidden_dimension": 8, "kernel_size": 5}),
    "patchtst": ("PatchTSTEstimator", {**_ENCODER, "patch_len": 4, "stride": 2}),
    "lagtst": ("LagTSTEstimator", {**_ENCODER, "freq": "h", "lags_seq": [1, 2, 3]}),
    "deepar": (
        "DeepAREstimator",
        {**_SMALL, "freq": "h", "hidden_size": 8, "dropout_rate": 0.0, "lags_seq": [1, 2, 3]},
    ),
    "tft": ("TemporalFusionTransformerEstimator", {**_SMALL, "freq": "h", "hidden_dim": 8, "dropout_rate": 0.0}),
    "tide": ("TiDEEstimator", {**_SMALL, "freq": "h", "dropout_rate": 0.0, "num_feat_dynamic_proj": 2}),
    "wavenet": ("WaveNetEstimator", {"freq": "h", "num_bins": 32, "seasonality": 4, "num_residual_channels": 4}),
}

for _name, (_estimator, _options) in _OPTIONS.items():
    _more = {"draws": True, "remark": "without dropout, whose rate cannot be set to 0"} if _name == "tide" else {}
    CASES.add(f"gluonts.{_name}", **_more)(lambda estimator=_estimator, options=_options: _train(estimator, options))
CASES.add("gluonts.itransformer")(lambda: _train("ITransformerEstimator", _ENCODER, several=True))
