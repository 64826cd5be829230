"""Models of pytorch-tabular, which makes module, data module and trainer from configurations."""

from __future__ import annotations

from typing import Any

from tools.bench.lightning.modules_case import Cases

__all__ = ["CASES", "load"]

CASES = Cases()


def load() -> None:
    """Import the library."""
    import pytorch_tabular.models  # noqa: F401


def _train(model: str, options: dict[str, Any], task: str = "classification") -> None:
    import numpy as np
    import pandas as pd
    from pytorch_tabular import TabularModel, models
    from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig

    rng, rows = np.random.default_rng(0), 64
    frame = pd.DataFrame({f"number{i}": rng.normal(size=rows).astype("float32") for i in range(4)})
    frame["kind"] = rng.integers(0, 4, rows).astype(str)
    frame["target"] = rng.integers(0, 3, rows) if task == "classification" else rng.normal(size=rows).astype("float32")
    data = DataConfig(
        target=["target"],
        continuous_cols=[f"number{i}" for i in range(4)],
        categorical_cols=["kind"],
        normalize_continuous_features=False,
    )
    trainer = TrainerConfig(batch_size=8, max_epochs=2, checkpoints=None, early_stopping=None, load_best=False,
                            progress_bar="none", accelerator="cpu")  # fmt: skip
    config = getattr(models, model)(task=task, batch_norm_continuous_input=False, **options)
    tabular = TabularModel(
        data_config=data, model_config=config, optimizer_config=OptimizerConfig(), trainer_config=trainer, verbose=False
    )
    tabular.fit(train=frame, validation=frame)


_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "category_embedding": ("CategoryEmbeddingModelConfig", {"layers": "16-16", "dropout": 0.0}),
    "ft_transformer": ("FTTransformerConfig", {"input_embed_dim": 16, "num_heads": 2, "num_attn_blocks": 2, "attn_dropout": 0.0,
                                               "add_norm_dropout": 0.0, "ff_dropout": 0.0}),
    "autoint": ("AutoIntConfig", {"attn_embed_dim": 8, "num_heads": 2, "num_attn_blocks": 2, "attn_dropouts": 0.0}),
    "gandalf": ("GANDALFConfig", {"gflu_stages": 2, "gflu_dropout": 0.0}),
}  # fmt: skip
for _name, (_model, _options) in _OPTIONS.items():
    CASES.add(f"pytorch_tabular.{_name}")(lambda model=_model, options=_options: _train(model, options))
CASES.add("pytorch_tabular.regression")(lambda: _train(*_OPTIONS["category_embedding"], task="regression"))
