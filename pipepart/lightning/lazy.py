"""Values that are known after the step only: what a metric returned inside a recorded step."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pipepart.errors import ConfigError

__all__ = ["Later"]


class Later:
    """Stands for a value while a step is recorded, and for what is computed from it; `value(known)` gives the real one."""

    def __init__(self, compute: Callable[[Mapping[int, Any]], Any], origin: str) -> None:
        self.__dict__.update(_compute=compute, _origin=origin)

    @staticmethod
    def of(ordinal: int, origin: str, key: str | None = None) -> Later:
        """The value of effect number `ordinal`, or of one entry if that is a dict."""
        return Later(lambda known: known[ordinal] if key is None else known[ordinal][key], origin)

    def value(self, known: Mapping[int, Any]) -> Any:
        return self._compute(known)

    def _then(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Later:
        for item in (*args, *kwargs.values()):
            if isinstance(item, torch.Tensor):
                raise ConfigError(
                    f"the step computes with the value of {self._origin} and a tensor of the model. That value is known "
                    "after the step, on the last stage: log it as it is, or use torchmetrics.functional in the step."
                )

        def compute(known: Mapping[int, Any]) -> Any:
            given = [item.value(known) if isinstance(item, Later) else item for item in args]
            named = {key: item.value(known) if isinstance(item, Later) else item for key, item in kwargs.items()}
            return function(*given, **named)

        return Later(compute, self._origin)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._then(getattr, self, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Later:
        return self._then(lambda function, *a, **k: function(*a, **k), self, *args, **kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        later = next(item for item in (*args, *(kwargs or {}).values()) if isinstance(item, Later))
        return later._then(func, *args, **(kwargs or {}))

    def _refuse(self, *args: Any) -> Any:
        raise ConfigError(
            f"the step makes a Python number of the value of {self._origin}, or decides by it. That value is known after "
            "the step: do it in a hook (on_train_batch_end, on_validation_epoch_end)."
        )

    __bool__ = __float__ = __int__ = __len__ = __iter__ = __format__ = __index__ = _refuse


def _install() -> None:
    def binary(function: Callable[[Any, Any], Any], reflected: bool) -> Callable[[Later, Any], Later]:
        return lambda self, other: self._then(function, *((other, self) if reflected else (self, other)))

    def unary(function: Callable[[Any], Any]) -> Callable[[Later], Later]:
        return lambda self: self._then(function, self)

    for name in ("add", "sub", "mul", "truediv", "pow"):
        function = getattr(operator, name)
        setattr(Later, f"__{name}__", binary(function, False))
        setattr(Later, f"__r{name}__", binary(function, True))
    for name in ("getitem", "lt", "le", "gt", "ge"):
        setattr(Later, f"__{name}__", binary(getattr(operator, name), False))
    for name in ("neg", "abs"):
        setattr(Later, f"__{name}__", unary(getattr(operator, name)))


_install()
