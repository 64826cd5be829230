"""Watch the trainers of a program: every Trainer gets the strategy, and all that must be equal is written down.

The program itself stays as it is. `watched_trainers` changes the defaults of `Trainer` of both namespaces for this process:
strategy, devices and precision are those of the run; limits keep it short; a logger and a callback write down what happens.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["Record", "fixed_draws", "watched_trainers"]

Record = dict[str, Any]
"""What one process has seen: the number of `steps`, `losses`, `logged`, `states` (of the module after each fit), `moved`
(whether that fit changed any of it) and `results` (of evaluations)."""


def watched_trainers(settings: Mapping[str, Any], strategy: Callable[[], Any] | None, dropout: bool = True) -> Record:
    """From here on, trainers of this process run with `settings`; returns the record that they fill.

    `strategy` makes the strategy of a trainer. None: one device, as Lightning chooses it. Without `dropout`, modules are
    trained with a rate of 0.
    """
    record: Record = {
        "dropout": dropout,
        "steps": 0,
        "losses": [],
        "logged": [],
        "states": [],
        "results": [],
        "moved": [],
    }
    for namespace in ("lightning.pytorch", "pytorch_lightning"):
        package = importlib.import_module(namespace)
        _watch(package, record, dict(settings), strategy)
    return record


def _watch(package: Any, record: Record, settings: dict[str, Any], strategy: Callable[[], Any] | None) -> None:
    trainer = package.Trainer
    construct, fit = trainer.__init__, trainer.fit
    logger, callback = _logger(package, record), _callback(package, record)
    names = set(inspect.signature(construct).parameters)

    @functools.wraps(construct)
    def make(self: Any, *args: Any, **given: Any) -> None:
        options = {**given, **{key: value for key, value in settings.items() if key in names}}
        options["callbacks"] = [*_as_list(given.get("callbacks")), callback()]
        if any(isinstance(one, package.callbacks.ProgressBar) for one in options["callbacks"]):
            options["enable_progress_bar"] = True
        options["logger"] = logger()
        if strategy is not None:
            options.update(strategy=strategy(), devices=2)
        construct(self, *args, **options)

    @functools.wraps(fit)
    def run(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if not record["dropout"]:
            _without_dropout(model)
        before = _state(model)
        result = fit(self, model, *args, **kwargs)
        record["states"].append(_state(model))
        record["moved"].append(_moved(before, record["states"][-1]))
        return result

    def evaluation(name: str) -> Callable[..., Any]:
        method = getattr(trainer, name)

        @functools.wraps(method)
        def evaluate(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = method(self, *args, **kwargs)
            record["results"].append((name, _tensors(result)))
            return result

        return evaluate

    trainer.__init__, trainer.fit = make, run
    for name in ("validate", "test", "predict"):
        setattr(trainer, name, evaluation(name))


def _logger(package: Any, record: Record) -> type:
    base = importlib.import_module(f"{package.__name__}.loggers.logger").Logger

    class Written(base):  # type: ignore[misc, valid-type]
        """Keeps what a trainer sends to loggers."""

        name = version = "written"

        @property
        def save_dir(self) -> str:
            return os.getcwd()

        root_dir = log_dir = save_dir

        @property
        def experiment(self) -> Any:
            return _Anything()

        def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
            record["logged"].append((step, {key: float(value) for key, value in metrics.items()}))

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
            pass

    return Written


class _Anything:
    """Takes the images and graphs that programs give to the object behind a logger."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def _callback(package: Any, record: Record) -> type:
    class Losses(package.Callback):  # type: ignore[misc]
        """Keeps the loss of each step."""

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
            record["steps"] += 1
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            if isinstance(loss, torch.Tensor):
                record["losses"].append(float(loss.detach()))

    return Losses


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def _state(module: Any) -> dict[str, torch.Tensor]:
    """The values of a module after a fit. A compiled module has those of what it wraps."""
    values = getattr(module, "_orig_mod", module).state_dict()
    return {key: value.detach().clone() for key, value in values.items() if isinstance(value, torch.Tensor)}


def _without_dropout(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(module, torch.nn.MultiheadAttention):
            module.dropout = 0.0


def _moved(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> bool:
    """Whether a fit has changed a value by more than a conversion to another precision does."""
    both = [(before[key].double(), after[key].double()) for key in before.keys() & after.keys()]
    return any(a.shape == b.shape and a.is_cpu and not torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in both)


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors and numbers in the result of an evaluation, in order."""
    if isinstance(value, torch.Tensor):
        return [value.detach().clone()]
    if isinstance(value, (bool, int, float)):
        return [torch.tensor(float(value), dtype=torch.float64)]
    if isinstance(value, Mapping):
        return [one for key in value for one in _tensors(value[key])]
    if isinstance(value, (list, tuple)):
        return [one for item in value for one in _tensors(item)]
    return []


def fixed_draws() -> None:
    """From here on, draws from normal distributions are numbers from -1 to 1 along the last dimension.

    Draws of a pipeline are others than those of one device: modules that draw are compared with these. Parameters keep the
    initial values that they draw with methods of tensors.
    """
    import torch.distributions.normal as normal
    import torch.distributions.utils as utils

    def fixed(*shape: Any, dtype: Any = None, device: Any = None, size: Any = None, **options: Any) -> torch.Tensor:
        sizes = tuple(size if size is not None else shape[0] if shape and not isinstance(shape[0], int) else shape)
        row = torch.linspace(-1.0, 1.0, int(sizes[-1]) if sizes else 1, dtype=dtype, device=device)
        return row.expand(sizes).clone() if sizes else row[0]

    def standard(shape: Any, dtype: Any, device: Any) -> torch.Tensor:
        return fixed(shape, dtype=dtype, device=device)

    def like(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        return fixed(tensor.shape, dtype=options.get("dtype", tensor.dtype), device=tensor.device)

    def scaled(mean: Any, std: Any = 1.0, size: Any = None, **options: Any) -> torch.Tensor:
        given = next((value for value in (mean, std) if isinstance(value, torch.Tensor)), None)
        if given is None:
            return mean + std * fixed(size, **options)
        return mean + std * like(torch.broadcast_tensors(torch.as_tensor(mean), torch.as_tensor(std))[0].to(given))

    utils._standard_normal = normal._standard_normal = standard  # type: ignore[attr-defined]
    torch.randn, torch.randn_like, torch.normal = fixed, like, scaled  # type: ignore[assignment]
