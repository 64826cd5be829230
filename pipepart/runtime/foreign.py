"""Tensors of other stages: this rank knows their form, and any use of their values is an error.

A plain meta tensor is not a safe stand-in: `here.add_(meta)` does nothing and raises nothing. A `ForeignTensor` has a form
(shape, dtype, names, `requires_grad`, `is_meta`), and ops on it raise, from Python and from C++, since the dispatcher calls
`__torch_dispatch__` before any kernel. The exception is arithmetic on tensors of a single other stage: all ranks run the
same code, so that stage computes the result, which is foreign here.

A parameter becomes foreign, and whole again, in place. So lists of parameters that a module or an optimizer made earlier
see the change.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch import nn

from pipepart.errors import ForeignTensorError

__all__ = ["ForeignParameter", "ForeignTensor", "Place", "become", "fill_in"]

_PLACE = "_pipepart_place"
_aten = torch.ops.aten
_ALIASES = {_aten.detach.default, _aten.alias.default}
_FORMS = {
    _aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like, _aten.randn_like,
    _aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty_strided, _aten.is_same_size,
}  # fmt: skip
"""Ops that read the form of a tensor only."""
_NORMS = {
    ("torch.nn.utils.clip_grad", "clip_grad_norm_"),
    ("lightning.pytorch.utilities.grads", "grad_norm"),
    ("lightning.fabric.utilities.grads", "grad_norm"),
    ("pytorch_lightning.utilities.grads", "grad_norm"),
    ("lightning_fabric.utilities.grads", "grad_norm"),
}
"""Functions that compute a norm over all gradients that they find, which would be the norm of one stage only."""


@dataclass(frozen=True)
class Place:
    """The home of a tensor."""

    name: str
    kind: str
    """``parameter`` or ``buffer``."""
    stage: int
    rank: int

    def refuse(self, use: str) -> NoReturn:
        """Raise the error for a use that needs the values."""
        raise ForeignTensorError(
            f"{self.kind} {self.name!r} lives on stage {self.stage} (rank {self.rank}); this rank holds no values of it, "
            f"and {use} needs them. Do one of these: put the code, on every rank, inside "
            "`with trainer.strategy.whole_parameters():` (with `Pipeline`: `with pipe.whole_parameters():`), where each rank "
            f"sees all values and keeps the values that it writes to its own; leave out tensors of other stages (`if not "
            "tensor.is_meta`); or keep modules that need each other on one stage (`keep_together=[[path, path]]`)."
        )


class ForeignTensor(torch.Tensor):
    """A tensor whose values are on another stage."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, tensor: torch.Tensor, place: Place, requires_grad: bool = False) -> ForeignTensor:
        made: ForeignTensor = torch.Tensor._make_subclass(cls, _form(tensor), requires_grad)
        made.__dict__[_PLACE] = place
        return made

    @property
    def place(self) -> Place:
        found: Place = self.__dict__[_PLACE]
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        found = next(leaf for leaf in tensors if isinstance(leaf, ForeignTensor))
        if func in _ALIASES:
            return ForeignTensor.of(found, found.place)
        if func.overloadpacket not in _FORMS and not _done_elsewhere(func, tensors):
            found.place.refuse(f"{func.overloadpacket.__name__}()")
        made = func(*pytree.tree_map(_by_form, args), **pytree.tree_map(_by_form, kwargs or {}))
        if func._schema.is_mutable:
            return args[0]
        return ForeignTensor.of(made, found.place) if isinstance(made, torch.Tensor) and made.is_meta else made

    @property
    def data(self) -> torch.Tensor:
        return ForeignTensor.of(self, self.place)

    @data.setter
    def data(self, value: Any) -> None:
        if not isinstance(value, ForeignTensor) or value.place.stage != self.place.stage:
            self.place.refuse("setting .data")

    @property
    def grad(self) -> Any:  # type: ignore[override]
        """Always None, since gradients are on the stage of the values. Optimizers skip the parameter."""
        frame: Any = sys._getframe(1)
        while frame.f_code.co_name.startswith("<"):  # the frame of a comprehension
            frame = frame.f_back
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) in _NORMS:
            raise ForeignTensorError(
                f"{frame.f_code.co_name}() takes the norm of the gradients it finds, and the gradient of parameter "
                f"{self.place.name!r} is on stage {self.place.stage} (rank {self.place.rank}). Do one of these: use "
                "gradient_clip_val or self.clip_gradients(...), which clip by the norm over all stages; or put the code, on "
                "every rank, inside `with trainer.strategy.whole_parameters(gradients=True):`."
            )
        return None

    @grad.setter
    def grad(self, value: Any) -> None:
        if value is not None:
            self.place.refuse("setting .grad")

    @grad.deleter
    def grad(self) -> None:
        return

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return (
            f"{type(self).__name__}({self.place.name!r}, on stage {self.place.stage}, shape={tuple(self.shape)}, "
            f"dtype={self.dtype}, requires_grad={self.requires_grad})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ForeignTensor:
        if id(self) not in memo:
            memo[id(self)] = type(self).of(self, self.place, self.requires_grad)
        copied: ForeignTensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.place.refuse("saving (pickling) it")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.place.refuse("converting it to an array")


def _refusing(method: str) -> Any:
    def refuse(self: ForeignTensor, *args: Any, **kwargs: Any) -> NoReturn:
        self.place.refuse(f"{method}()")

    return refuse


for _method in ("numpy", "tolist", "data_ptr", "untyped_storage", "share_memory_", "__dlpack__"):
    setattr(ForeignTensor, _method, _refusing(_method))
ForeignTensor.storage = ForeignTensor._typed_storage = ForeignTensor.untyped_storage  # type: ignore[method-assign]
ForeignTensor.__dlpack_device__ = ForeignTensor.__dlpack__  # type: ignore[method-assign,assignment]


class ForeignParameter(ForeignTensor):
    """A parameter of another stage, for which `isinstance(..., nn.Parameter)` is true."""

    _is_param = True


def become(parameter: nn.Parameter, place: Place | None) -> None:
    """Make a parameter foreign in place and free its memory. Without a place it becomes a plain meta tensor."""
    if place is None:
        _exchange(parameter, nn.Parameter(_form(parameter), requires_grad=parameter.requires_grad))
        parameter.__dict__.pop(_PLACE, None)
    else:
        _exchange(parameter, ForeignParameter.of(parameter, place, parameter.requires_grad))
        parameter.__dict__[_PLACE] = place


def fill_in(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Give values to a foreign parameter, in place."""
    _exchange(parameter, nn.Parameter(values, requires_grad=parameter.requires_grad))
    parameter.__dict__.pop(_PLACE, None)


def _exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    """Swap the contents of two tensors, but not their attributes, such as marks for an optimizer.

    `torch.utils.swap_tensors` refuses tensors with other references, which is the case here.
    """
    one.__class__, other.__class__ = other.__class__, one.__class__
    torch._C._swap_tensor_impl(one, other)  # type: ignore[attr-defined]


def _done_elsewhere(func: Any, tensors: list[torch.Tensor]) -> bool:
    """Return whether another stage computes this op, since all ranks run the same code.

    This holds for arithmetic on tensors of one other stage and plain numbers: `target.mul_(m).add_(online, alpha=1 - m)`.
    """
    arithmetic = torch.Tag.pointwise in func.tags or func is _aten.copy_.default
    if not arithmetic or torch.Tag.nondeterministic_seeded in func.tags or func._overloadname.endswith("out"):
        return False
    if any(
        str(result.type) != "Tensor" for result in func._schema.returns
    ):  # a number, on which Python code may branch
        return False
    return len({t.place.stage if isinstance(t, ForeignTensor) else None for t in tensors}) == 1


def _by_form(value: Any) -> Any:
    return _form(value) if isinstance(value, ForeignTensor) else value


def _form(tensor: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor of the same form."""
    if isinstance(tensor, ForeignTensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return torch.empty_like(tensor.detach(), device="meta")
