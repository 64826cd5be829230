"""Parameters that a run changes in place: they are copied before the first change, and restored after the run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

__all__ = ["KeptParameters", "keep"]

_running: list[KeptParameters] = []


class KeptParameters(TorchFunctionMode):
    """Restores, at the end, the parameters that functions of torch inside have changed."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self._parameters = list(parameters)
        self._memory: dict[int | None, nn.Parameter] | None = None
        self._saved: dict[int, tuple[nn.Parameter, torch.Tensor, torch.Tensor]] = {}

    def __enter__(self) -> KeptParameters:
        _running.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _running.remove(self)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for parameter, data, copy in self._saved.values():
                if parameter.data_ptr() != data.data_ptr():
                    parameter.data = data
                parameter.data.copy_(copy)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and _changes(func):
            self.keep(args[0])
        elif "out" in kwargs:
            self.keep(kwargs["out"])
        return func(*args, **kwargs)

    def keep(self, changed: Any) -> None:
        """Copy the parameters in whose memory these tensors are, before they change."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for tensor in changed if isinstance(changed, (list, tuple)) else (changed,):
                if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor) or tensor.is_meta:
                    continue
                if self._memory is None:
                    held = [p for p in self._parameters if not p.is_meta and not isinstance(p, FakeTensor)]
                    self._memory = {_memory_of(p): p for p in held}
                parameter = self._memory.get(_memory_of(tensor))
                if parameter is not None and id(parameter) not in self._saved:
                    data = parameter.data
                    self._saved[id(parameter)] = parameter, data, data.clone()


_CHANGING = frozenset(
    ["__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "and", "or"))]
)
_NOT_CHANGING = frozenset(["requires_grad_", "detach_", "share_memory_", "rename_"])
"""Functions that change no values, although their names end like those that do."""
_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _changes(func: Any) -> bool:
    """Whether a function of torch changes the values of its first argument. Setting `.grad` does not."""
    name = getattr(func, "__name__", "")
    if name[-2:] == "__":
        return name in _CHANGING or func == _SET_DATA
    return name[-1:] == "_" and name not in _NOT_CHANGING


def _memory_of(tensor: torch.Tensor) -> int | None:
    """A number for the memory of a tensor; None for wrappers of torch (transforms), which are no parameters."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return None


def keep(tensor: torch.Tensor) -> None:
    """Copy a parameter before the recorder changes it without a function of torch."""
    if _running:
        _running[-1].keep(tensor)
