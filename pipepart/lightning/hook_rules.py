"""Rules for code of hooks: functions that read no values, that write, that stay on one stage; code that names tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric, MetricCollection

__all__ = [
    "FORMS",
    "GRADIENT",
    "SET_DATA",
    "SET_GRADIENT",
    "internal",
    "is_local",
    "may_touch",
    "of_library",
    "tells_apart",
    "writes",
]

_T: Any = torch.Tensor
GRADIENT, SET_GRADIENT, SET_DATA = _T.grad.__get__, _T.grad.__set__, _T.data.__set__
FORMS = frozenset(
    [
        getattr(_T, name).__get__
        for name in (
            "shape", "dtype", "device", "requires_grad", "is_leaf", "grad_fn", "layout", "ndim", "data", "is_cuda",
            "is_cpu", "is_meta", "is_sparse", "is_quantized", "_version", "output_nr", "itemsize", "nbytes", "name",
            "retains_grad", "_base",
        )
    ]
    + [
        getattr(_T, name)
        for name in (
            "size", "dim", "numel", "nelement", "stride", "is_floating_point", "is_complex", "is_contiguous", "element_size",
            "requires_grad_", "detach", "register_hook", "register_post_accumulate_grad_hook", "get_device", "__len__",
            "__hash__", "__repr__", "is_signed", "is_same_size", "is_pinned", "retain_grad", "storage_offset", "ndimension",
        )
    ]
    + [_T.requires_grad.__set__, torch.is_floating_point, torch.is_complex, torch.numel, torch.is_tensor]
)  # fmt: skip
"""Functions of torch that need the form of a tensor only, or make an alias of it."""
_LOCAL = frozenset(
    ["data.__set__"]
    + [
        name + end
        for name in ("mul", "add", "sub", "div", "clamp", "clamp_min", "clamp_max", "lerp")
        for end in ("", "_")
    ]
    + ["copy_", "neg", "__mul__", "__rmul__", "__add__", "__radd__", "__sub__", "__truediv__", "__imul__", "__iadd__"]
    + ["__isub__", "__itruediv__"]
)
"""Arithmetic that a stage does alone if all tensors are its own (`runtime/foreign.py` leaves it out on other stages)."""
_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "pipepart")
_INTERNAL = (
    "torch.optim", "torch.amp", "lightning.pytorch.plugins", "lightning.fabric.plugins", "pytorch_lightning.plugins",
    "lightning_fabric.plugins", "pipepart",
)  # fmt: skip
_FOLLOWING = {"pipepart.lightning.hook_calls", "pipepart.lightning.hook_rules", "pipepart.runtime.foreign"}
_FIRST = "pipepart.lightning.hooks"
"""The module that calls hooks."""
_WORDS = frozenset(
    {
        "parameters", "named_parameters", "buffers", "named_buffers", "state_dict", "load_state_dict", "modules",
        "named_modules", "children", "named_children", "get_parameter", "get_buffer", "get_submodule", "apply", "grad",
        "grad_norm", "clip_grad_norm_", "clip_grad_value_", "deepcopy", "params", "parameters_to_vector",
        "vector_to_parameters", "requires_grad_", "forward",
    }
)  # fmt: skip
"""Names in the code of a hook by which it may reach tensors of the model."""


def _belongs(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def of_library(function: Any) -> bool:
    """Whether a function is part of Lightning, torch, torchmetrics or pipepart, and not of the user's program."""
    return _belongs(getattr(function, "__module__", None) or "", _LIBRARIES)


def internal(frame: Any = None) -> bool:
    """Whether an optimizer, a precision plugin or pipepart itself does this, on behalf of the hook: each stage for its own."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == _FIRST:
            return False
        if name not in _FOLLOWING and _belongs(name, _INTERNAL):
            return True
        if frame.f_code.co_name == "zero_grad" and name == "torch.nn.modules.module":
            return True
        frame = frame.f_back
    return False


def tells_apart(frame: Any) -> bool:
    """Whether the code in `frame`, which asks for `is_meta`, is of the user's program."""
    while frame.f_code.co_name.startswith("<"):  # the frame of a comprehension
        frame = frame.f_back
    return not _belongs(frame.f_globals.get("__name__", ""), _LIBRARIES)


def _name(func: Any) -> str:
    return "data.__set__" if func == SET_DATA else getattr(func, "__name__", "")


def writes(func: Any) -> bool:
    """Whether a function of torch changes its first tensor."""
    name = _name(func)
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in (
        "__setitem__",
        "data.__set__",
        "__imul__",
        "__iadd__",
        "__isub__",
        "__itruediv__",
        "__ipow__",
    )


def is_local(func: Any, tensors: list[torch.Tensor]) -> bool:
    """Whether a stage that has all `tensors` runs this function alone."""
    return _name(func) in _LOCAL and len(tensors) <= 3


# ---- code that names tensors


def may_touch(function: Any, owner: Any, root: nn.Module) -> bool:
    """Whether the code of a hook names something by which it can reach tensors of the model.

    It decides on the cost only: a hook that does not, and touches them in a later call all the same, is refused by name.
    """
    names = _WORDS | set(_names_of_tensors(root))
    return any(name in names for name in _names(function, owner, set()))


def _names_of_tensors(root: nn.Module) -> Iterator[str]:
    for module in root.modules():
        yield from module._parameters
        yield from module._buffers
        for name, child in module._modules.items():
            empty = child is None or isinstance(child, (Metric, MetricCollection))
            if not empty and child is not None and any(True for _ in (*child.parameters(), *child.buffers())):
                yield name


def _names(function: Any, owner: Any, seen: set[CodeType]) -> Iterator[str]:
    """Yield the names in the code of a function, and in the functions of the user's program that these names reach."""
    while not isinstance(function, (FunctionType, MethodType)) or hasattr(function, "__wrapped__"):
        following = getattr(function, "__wrapped__", None) or getattr(function, "func", None)
        if following is None:
            return
        function = following
    if isinstance(function, MethodType):
        owner, function = function.__self__, function.__func__
    if of_library(function) or function.__code__ in seen:
        return
    names = set(_code_names(function.__code__, seen))
    yield from names
    cells = [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
    objects = [owner, *(vars(owner).get(name) for name in names if hasattr(owner, "__dict__") and name in vars(owner))]
    for reached in (*cells, *(function.__globals__.get(name) for name in names), *_methods(objects, names)):
        if isinstance(reached, (FunctionType, MethodType)):
            yield from _names(reached, owner, seen)


def _methods(objects: list[Any], names: set[str]) -> Iterator[Callable[..., Any]]:
    for thing in objects:
        if thing is None or isinstance(thing, (FunctionType, MethodType, type)):
            continue
        for name in names:
            found = getattr(type(thing), name, None)
            if isinstance(found, FunctionType):
                yield MethodType(found, thing)


def _code_names(code: CodeType, seen: set[CodeType]) -> Iterator[str]:
    seen.add(code)
    yield from code.co_names
    for constant in code.co_consts:
        if constant == "params":  # of a group of an optimizer
            yield constant
        if isinstance(constant, CodeType):
            yield from _code_names(constant, seen)


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
