"""Facts about torch functions that a recorder has to know by name."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn as nn

__all__ = [
    "ARITHMETIC",
    "DATA_READS",
    "DATA_SHAPED",
    "DUNDERS",
    "NOT_OPS",
    "OPERATORS",
    "RANDOM_MODULES",
    "is_random_name",
    "reads_training_flag",
    "training_position",
]

ARITHMETIC = frozenset(
    f"{prefix}{name}{suffix}"
    for name in ("add", "sub", "mul", "truediv", "div", "pow", "rsub", "lt", "le", "gt", "ge", "eq", "ne")
    for prefix, suffix in (("", ""), ("__", "__"), ("__r", "__"), ("__i", "__"), ("", "_"))
) | {"lerp", "lerp_", "addcmul", "addcdiv", "true_divide", "multiply", "subtract", "divide"}
"""Calls whose result has the form of their tensors, whatever their numbers are."""

DATA_READS = frozenset(
    [
        "item",
        "tolist",
        "numpy",
        "__array__",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__complex__",
        "__contains__",
        "equal",
        "allclose",
        "is_nonzero",
    ]
)
"""Calls that turn the contents of a tensor into Python values."""

DATA_SHAPED = frozenset(
    [
        "nonzero",
        "argwhere",
        "unique",
        "unique_consecutive",
        "_unique",
        "_unique2",
        "masked_select",
        "bincount",
        "repeat_interleave",
        "combinations",
        "_pack_padded_sequence",
        "_pad_packed_sequence",
    ]
)
"""Calls whose result has a shape that depends on the contents of a tensor."""

NOT_OPS = frozenset(
    [
        "__repr__",
        "__format__",
        "__str__",
        "__len__",
        "__hash__",
        "__reduce_ex__",
        "__deepcopy__",
        "_assert",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
        "retain_grad",
    ]
)
"""Calls that compute nothing: never recorded."""

RANDOM_MODULES = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
    nn.RReLU,
)

_RANDOM_PREFIXES = ("rand", "normal", "bernoulli", "multinomial", "poisson", "dropout", "uniform", "exponential")
_RANDOM_NAMES = frozenset(
    [
        "alpha_dropout",
        "feature_dropout",
        "feature_alpha_dropout",
        "rrelu",
        "gumbel_softmax",
        "cauchy_",
        "geometric_",
        "log_normal_",
        "binomial",
        "_sample_dirichlet",
        "_standard_gamma",
    ]
)
_NOT_RANDOM = ("normalize", "poisson_nll_loss")

OPERATORS: dict[str, Callable[..., Any]] = {
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    "__invert__": operator.invert,
    "__neg__": operator.neg,
}
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "xor", "lshift", "rshift"):
    OPERATORS[f"__{_name}__"] = getattr(operator, _name)
    OPERATORS[f"__i{_name}__"] = getattr(operator, f"i{_name}")
for _name in ("and", "or"):
    OPERATORS[f"__{_name}__"] = getattr(operator, f"{_name}_")
    OPERATORS[f"__i{_name}__"] = getattr(operator, f"i{_name}")
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    OPERATORS[f"__{_name}__"] = getattr(operator, _name)


DUNDERS: dict[Any, str] = {}
"""Tensor methods behind operators, by identity: some carry the name of the function that they wrap."""
for _name in [name for name in dir(torch.Tensor) if name.startswith("__") and name.endswith("__")]:
    _method = getattr(torch.Tensor, _name)
    if callable(_method) and not isinstance(_method, type):
        DUNDERS.setdefault(_method, _name)


def is_random_name(name: str) -> bool:
    """Whether a torch function of this name draws random numbers."""
    return (name.startswith(_RANDOM_PREFIXES) and name not in _NOT_RANDOM) or name in _RANDOM_NAMES


@cache
def training_position(function: Callable[..., Any]) -> int | None:
    """Where a function of ``torch.nn.functional`` takes its ``training`` flag; None if it takes none."""
    if getattr(function, "__module__", None) != "torch.nn.functional" and not str(
        getattr(function, "__module__", "")
    ).startswith("torch._jit_internal"):
        return None
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("training") if "training" in names else None


def reads_training_flag(kind: type[nn.Module]) -> bool:
    """Whether the forward of a module class decides by ``self.training``."""
    if kind not in _reads_training:
        try:
            _reads_training[kind] = ".training" in inspect.getsource(kind.forward)
        except (OSError, TypeError):
            _reads_training[kind] = False
    return _reads_training[kind]


_reads_training: dict[Any, bool] = {}


def tensor_method(function: Any, name: str) -> bool:
    """Whether `function` is the method `name` of tensors."""
    return getattr(torch.Tensor, name, None) is function or getattr(torch._C.TensorBase, name, None) is function
