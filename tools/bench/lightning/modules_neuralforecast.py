"""Models of neuralforecast, which uses the namespace pytorch_lightning; windows of series are cut inside of the step."""

from __future__ import annotations

from typing import Any

from tools.bench.lightning.modules_case import Cases

__all__ = ["CASES", "load"]

CASES = Cases()


def load() -> None:
    """Import the library."""
    import neuralforecast.models  # noqa: F401


def _train(model: str, options: dict[str, Any]) -> None:
    import numpy as np
    import pandas as pd
    from neuralforecast import NeuralForecast, models

    rng, length = np.random.default_rng(0), 40
    frame = pd.DataFrame(
        {
            "unique_id": np.repeat([f"s{number}" for number in range(8)], length),
            "ds": np.tile(pd.date_range("2024-01-01", periods=length, freq="D"), 8),
            "y": rng.normal(5, 1, 8 * length),
        }
    )
    common = {
        "h": 4,
        "input_size": 8,
        "max_steps": 6,
        "val_check_steps": 3,
        "batch_size": 4,
        "windows_batch_size": None,
    }
    module = getattr(models, model)(**common, **options)
    NeuralForecast(models=[module], freq="D").fit(frame, val_size=4)


_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "mlp": ("MLP", {"num_layers": 2, "hidden_size": 16}),
    "nhits": ("NHITS", {"mlp_units": [[8, 8]] * 3, "n_blocks": [1, 1, 1]}),
    "nbeats": ("NBEATS", {"mlp_units": [[8, 8]] * 3}),
    "dlinear": ("DLinear", {"moving_avg_window": 5}),
    "nlinear": ("NLinear", {}),
    "tide": ("TiDE", {"hidden_size": 16, "decoder_output_dim": 8, "temporal_decoder_dim": 8, "dropout": 0.0}),
    "patchtst": ("PatchTST", {"hidden_size": 16, "n_heads": 2, "encoder_layers": 2, "linear_hidden_size": 16, "patch_len": 4,
                              "stride": 2, "dropout": 0.0, "fc_dropout": 0.0, "attn_dropout": 0.0}),
    "tft": ("TFT", {"hidden_size": 8, "n_head": 2, "dropout": 0.0, "attn_dropout": 0.0}),
    "lstm": ("LSTM", {"encoder_hidden_size": 8, "decoder_hidden_size": 8, "encoder_n_layers": 2}),
    "gru": ("GRU", {"encoder_hidden_size": 8, "decoder_hidden_size": 8, "encoder_n_layers": 2}),
    "transformer": ("VanillaTransformer", {"hidden_size": 16, "n_head": 2, "conv_hidden_size": 8, "dropout": 0.0}),
    "bitcn": ("BiTCN", {"hidden_size": 8, "dropout": 0.0}),
}  # fmt: skip

_ALL = "all windows, none drawn"
for _name, (_model, _options) in _OPTIONS.items():
    _norm = {"microbatches": 1, "remark": f"{_ALL}; microbatches=1: batch norm"} if _name == "patchtst" else {}
    CASES.add(f"neuralforecast.{_name}", **{"trainer": {"max_epochs": None}, "remark": _ALL, **_norm})(
        lambda model=_model, options=_options: _train(model, options)
    )
