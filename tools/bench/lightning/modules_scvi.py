"""Models of scvi-tools: variational models of cells, whose training plans hold composed metrics."""

from __future__ import annotations

from typing import Any

from tools.bench.lightning.modules_case import Cases

__all__ = ["CASES", "load"]

CASES = Cases()
_PLAIN: dict[str, Any] = {"draws": True, "remark": "draws fixed"}
_STATISTICS: dict[str, Any] = {"draws": True, "microbatches": 1, "remark": "draws fixed; microbatches=1: batch norm"}
_SINGLE: dict[str, Any] = {"trainer": {"precision": "32-true"}, "relative": 1e-4}
"""For models that convert to single precision themselves."""
_NO_STATISTICS = {"use_batch_norm": "none", "use_layer_norm": "both"}


def load() -> None:
    """Import the library."""
    import scvi  # noqa: F401


def _train(model: str, options: dict[str, Any], setup: dict[str, Any] | None = None, **training: Any) -> None:
    import scvi

    scvi.settings.seed = 0  # the split into training and validation is another one in each process without
    data = scvi.data.synthetic_iid(batch_size=24, n_genes=20, n_proteins=6, n_regions=10)
    kind = getattr(scvi.model, model)
    kind.setup_anndata(data, **{"batch_key": "batch", **(setup or {})})
    made = kind(data, **options)
    made.train(max_epochs=2, batch_size=16, train_size=0.8, **training)


@CASES.add("scvi.scvi", **_PLAIN)
def _scvi() -> None:
    _train("SCVI", {"n_hidden": 16, "n_latent": 4, "dropout_rate": 0.0, **_NO_STATISTICS})


@CASES.add("scvi.scvi_batch_norm", **_STATISTICS)
def _scvi_batch_norm() -> None:
    _train("SCVI", {"n_hidden": 16, "n_latent": 4, "dropout_rate": 0.0})


@CASES.add("scvi.scvi_plateau", **_PLAIN)
def _scvi_plateau() -> None:
    plan = {"reduce_lr_on_plateau": True, "n_epochs_kl_warmup": 2, "lr": 0.01}
    options = {"n_hidden": 16, "n_latent": 4, "dropout_rate": 0.0, "gene_likelihood": "nb", **_NO_STATISTICS}
    _train("SCVI", options, plan_kwargs=plan, check_val_every_n_epoch=1)


@CASES.add("scvi.linear", **_STATISTICS, **_SINGLE)
def _linear() -> None:
    _train("LinearSCVI", {"n_hidden": 16, "n_latent": 4, "dropout_rate": 0.0})


@CASES.add("scvi.scanvi", **_STATISTICS)
def _scanvi() -> None:
    setup = {"labels_key": "labels", "unlabeled_category": "label_0"}
    _train("SCANVI", {"n_hidden": 16, "n_latent": 4, "dropout_rate": 0.0}, setup)


@CASES.add("scvi.condscvi", **_STATISTICS)
def _condscvi() -> None:
    _train("CondSCVI", {"n_hidden": 16, "n_latent": 4, "dropout_rate": 0.0}, {"labels_key": "labels"})


@CASES.add("scvi.peakvi", **_STATISTICS, **_SINGLE)
def _peakvi() -> None:
    _train("PEAKVI", {"n_hidden": 16, "n_latent": 4, "dropout_rate": 0.0})
