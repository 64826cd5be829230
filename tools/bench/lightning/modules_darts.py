"""Forecasting models of darts: one base module for all networks, with metrics, likelihoods and a scheduler."""

from __future__ import annotations

from typing import Any

from tools.bench.lightning.modules_case import Cases

__all__ = ["CASES", "load"]

CASES = Cases()


def load() -> None:
    """Import the library."""
    from darts.models import NBEATSModel  # noqa: F401


def _train(model: str, options: dict[str, Any], likelihood: str = "", metric: bool = False) -> None:
    import numpy as np
    import torchmetrics
    from darts import TimeSeries, models
    from darts.utils import likelihood_models

    rng = np.random.default_rng(0)
    series = [TimeSeries.from_values(np.sin(np.arange(40) / 3) + rng.normal(0, 0.1, 40)) for _ in range(3)]
    if likelihood:
        options = {**options, "likelihood": getattr(likelihood_models, likelihood)()}
    if metric:
        options = {**options, "torch_metrics": torchmetrics.MeanAbsoluteError()}
    network = getattr(models, model)(batch_size=8, n_epochs=2, random_state=0, **options)
    network.fit(series, val_series=series)


_BLOCKS = {"input_chunk_length": 8, "output_chunk_length": 4}
_ENCODER = {
    **_BLOCKS,
    "d_model": 16,
    "nhead": 2,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
    "dim_feedforward": 16,
}
_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "nbeats": ("NBEATSModel", {**_BLOCKS, "num_stacks": 2, "num_layers": 2, "layer_widths": 8}),
    "nhits": ("NHiTSModel", {**_BLOCKS, "num_layers": 2, "layer_widths": 8, "dropout": 0.0}),
    "tcn": ("TCNModel", {**_BLOCKS, "dropout": 0.0, "num_filters": 4}),
    "transformer": ("TransformerModel", {**_ENCODER, "dropout": 0.0}),
    "block_rnn": ("BlockRNNModel", {**_BLOCKS, "hidden_dim": 8, "n_rnn_layers": 2, "dropout": 0.0}),
    "dlinear": ("DLinearModel", {**_BLOCKS, "kernel_size": 5}),
    "nlinear": ("NLinearModel", _BLOCKS),
    "tide": ("TiDEModel", {**_BLOCKS, "hidden_size": 8, "dropout": 0.0}),
    "tsmixer": ("TSMixerModel", {**_BLOCKS, "hidden_size": 8, "ff_size": 8, "dropout": 0.0}),
}

for _name, (_model, _options) in _OPTIONS.items():
    CASES.add(f"darts.{_name}")(lambda model=_model, options=_options: _train(model, options))
CASES.add("darts.dlinear_gaussian")(lambda: _train(*_OPTIONS["dlinear"], likelihood="GaussianLikelihood"))
CASES.add("darts.nbeats_metrics")(lambda: _train(*_OPTIONS["nbeats"], metric=True))
