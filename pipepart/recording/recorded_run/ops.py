"""Properties of torch functions and modules: which calls are ops, their names in a graph, and their behaviour."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn

from pipepart.recording.recorded_run import intrinsics
from pipepart.recording.recorded_run.tensors import tensors_in

__all__ = [
    "ARITHMETIC",
    "DATA_READS",
    "DATA_SHAPED",
    "DUNDERS",
    "NOT_OPS",
    "OPERATORS",
    "TEXTS",
    "buffers_of",
    "can_be_opened",
    "draws",
    "has_global_hooks",
    "is_closed",
    "is_leaf",
    "is_metric",
    "is_random_name",
    "is_torch_leaf",
    "name_of",
    "nameable",
    "reads_training_flag",
    "shape_from_data",
    "tensor_method",
    "training_position",
]

ARITHMETIC = frozenset(
    f"{prefix}{name}{suffix}"
    for name in ("add", "sub", "mul", "truediv", "div", "pow", "rsub", "lt", "le", "gt", "ge", "eq", "ne")
    for prefix, suffix in (("", ""), ("__", "__"), ("__r", "__"), ("__i", "__"), ("", "_"))
) | {"lerp", "lerp_", "addcmul", "addcdiv", "true_divide", "multiply", "subtract", "divide"}
"""Calls whose result has the form of their tensors for all values of their numbers."""

DATA_READS = frozenset([
    "item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "__complex__",
    "__contains__", "equal", "allclose", "is_nonzero",
])  # fmt: skip
"""Calls that turn the contents of a tensor into Python values."""

DATA_SHAPED = frozenset([
    "nonzero", "argwhere", "unique", "unique_consecutive", "_unique", "_unique2", "masked_select", "bincount",
    "repeat_interleave", "combinations", "_pack_padded_sequence", "_pad_packed_sequence",
])  # fmt: skip
"""Calls whose result has a shape that depends on the contents of a tensor."""

NOT_OPS = frozenset([
    "__repr__", "__format__", "__str__", "__len__", "__hash__", "__reduce_ex__", "__deepcopy__", "_assert",
    "is_floating_point", "is_complex", "is_contiguous", "retain_grad",
])  # fmt: skip
"""Calls that compute nothing: never recorded."""

TEXTS = frozenset(["__repr__", "__format__", "__str__"])
"""Calls that make a text of a tensor."""

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_RANDOM_MODULES = (*_DROPOUTS, nn.RReLU)

_RANDOM_PREFIXES = ("rand", "normal", "bernoulli", "multinomial", "poisson", "dropout", "uniform", "exponential")
_RANDOM_NAMES = frozenset([
    "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "rrelu", "gumbel_softmax", "cauchy_", "geometric_",
    "log_normal_", "binomial", "_sample_dirichlet", "_standard_gamma",
])  # fmt: skip
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
    """Return whether a torch function of this name draws random numbers."""
    return (name.startswith(_RANDOM_PREFIXES) and name not in _NOT_RANDOM) or name in _RANDOM_NAMES


@cache
def training_position(function: Callable[..., Any]) -> int | None:
    """Return the position of the ``training`` argument of a function of ``torch.nn.functional``, or None."""
    if getattr(function, "__module__", None) != "torch.nn.functional" and not str(
        getattr(function, "__module__", "")
    ).startswith("torch._jit_internal"):
        return None
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("training") if "training" in names else None


@cache
def reads_training_flag(kind: type[nn.Module]) -> bool:
    """Return whether the forward of a module class reads ``self.training``."""
    try:
        return ".training" in inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return False


def tensor_method(function: Any, name: str) -> bool:
    """Return whether `function` is the method `name` of tensors."""
    return getattr(torch.Tensor, name, None) is function or getattr(torch._C.TensorBase, name, None) is function


def name_of(function: Any) -> str:
    """Return the name by which the recorder knows a torch function."""
    try:
        return DUNDERS.get(function) or str(getattr(function, "__name__", function))
    except TypeError:  # not hashable
        return str(getattr(function, "__name__", function))


def nameable(function: Any) -> Any:
    """Return `function`, or a plain function around it if fx cannot write its name into code."""
    try:
        name = fx.node._get_qualified_name(function)
        if name.startswith("torch."):  # fx trusts that such a name can be looked up
            found: Any = torch
            for part in name.split(".")[1:]:
                found = getattr(found, part)
            if found is not function:
                raise AttributeError(name)
        return function
    except Exception:
        return intrinsics.opaque_function(function, getattr(function, "__qualname__", type(function).__name__))


def shape_from_data(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether the shape of the result of a call depends on the contents of a tensor."""
    if name == "repeat_interleave":
        return any(isinstance(arg, torch.Tensor) for arg in (*args[1:2], kwargs.get("repeats"))) and (
            "output_size" not in kwargs
        )
    if name in DATA_SHAPED or (name == "where" and len(args) + len(kwargs) == 1):
        return True
    return name == "__getitem__" and any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in(args[1:]))


_OPEN = (
    *(nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict),
    *(nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder),
    *(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
)
"""Modules of ``torch.nn`` that are made of others: the ops inside them are recorded."""


def is_metric(module: nn.Module) -> bool:
    """Return whether a module is a metric of torchmetrics, which is not imported for this."""
    kind = type(module)
    return all(hasattr(kind, name) for name in ("update", "compute", "reset")) and any(
        base.__module__.startswith("torchmetrics") for base in kind.__mro__
    )


def is_leaf(module: nn.Module) -> bool:
    """Return whether a call of this module is one op, if nothing else is known of it."""
    if is_metric(module) or is_torch_leaf(module) or type(module).__module__.startswith("einops.layers."):
        return True
    kind: Any = type(module)
    return not isinstance(module, _OPEN) and not module._modules and reads_training_flag(kind)


def can_be_opened(module: nn.Module) -> bool:
    """Return whether a module that is one op has code of the user, whose ops can be recorded instead."""
    foreign = is_metric(module) or is_torch_leaf(module) or type(module).__module__.startswith("einops.layers.")
    return not foreign and not isinstance(module, nn.modules.batchnorm._BatchNorm)


def is_torch_leaf(module: nn.Module) -> bool:
    """Return whether a module comes from torch itself and is more than a container of others."""
    home = type(module).__module__
    if isinstance(module, _OPEN) or home.startswith("torch.nn.parallel"):
        return False
    return home.startswith(("torch.nn.", "torch.ao.nn.", "torch.jit"))


def has_global_hooks() -> bool:
    """Return whether hooks on all modules of the process are registered."""
    names = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
    return any(getattr(nn.modules.module, name) for name in names)


def is_closed(module: nn.Module) -> bool:
    """Return whether a module runs only code of torch, on its own parameters and its arguments."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return (
        not module._modules
        and not hooks
        and not has_global_hooks()
        and "forward" not in vars(module)
        and all(type(p) is nn.Parameter for p in module._parameters.values() if p is not None)
        and type(module).__module__.startswith("torch.nn.modules.")
    )


def buffers_of(module: nn.Module) -> list[torch.Tensor]:
    """Return the buffers of a module and of the modules inside it."""
    if module._modules:
        return list(module.buffers())
    return [buffer for buffer in module._buffers.values() if buffer is not None]


def draws(module: nn.Module) -> bool:
    """Return whether a call of a module of torch draws random numbers in the current mode."""
    parts = module.modules() if module._modules else (module,)
    return any(isinstance(part, _RANDOM_MODULES) and part.training and getattr(part, "p", 1) for part in parts) or (
        isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and module.training and bool(module.dropout)
    )
