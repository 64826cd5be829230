"""The inputs of a network: what a step of its LightningModule passes to it, or what a user gives, with their names."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from pipepart.errors import ConfigError

__all__ = ["named_leaves", "observed_call"]

_STEPS = ("predict_step", "validation_step", "test_step", "training_step")


class _Seen(Exception):
    """The network was called: the rest of the step is not needed."""


def observed_call(root: nn.Module, part: nn.Module, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the first call of `part` while `root`, a LightningModule, runs a step on a batch."""
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append((args, kwargs))
        raise _Seen

    steps = [name for name in _STEPS if _is_own(root, name)]
    handle = part.register_forward_pre_hook(note, with_kwargs=True)
    failure: Exception | None = None
    try:
        for name in steps:
            try:
                with torch.no_grad(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # self.log without a trainer
                    getattr(root, name)(batch, 0)
            except _Seen:
                pass
            except Exception as error:  # a step may need its trainer; another one may not
                failure = failure or error
            if found:
                return found[0]
    finally:
        handle.remove()
    reason = f" ({type(failure).__name__}: {failure})" if failure is not None else ""
    raise ConfigError(
        f"no step of {type(root).__name__} ({', '.join(steps) or 'it has none'}) calls {type(part).__name__}{reason}: name "
        "the module that they call with --module, or give --class a function that returns (module, example arguments)"
    )


def _is_own(root: nn.Module, name: str) -> bool:
    """Whether a class has a step of its own: those of Lightning do nothing, or need a forward."""
    function = getattr(type(root), name, None)
    return function is not None and not str(getattr(function, "__module__", "")).startswith(
        ("lightning.pytorch.", "pytorch_lightning.")
    )


def named_leaves(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors among the arguments of a call, in the order of `tree_flatten`, named after the parameters of forward."""
    names = _positional(module, len(args))
    parts = [*zip(names, args), *((name, kwargs[name]) for name in _in_order(kwargs))]
    for name, value in parts:
        tensors = [leaf for leaf in _pytree.tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]
        for number, tensor in enumerate(tensors):
            yield (name if len(tensors) == 1 else f"{name}_{number}"), tensor


def _in_order(kwargs: Mapping[str, Any]) -> list[str]:
    """The keys of a mapping in the order in which `tree_flatten` gives its values."""
    numbered = _pytree.tree_unflatten(list(range(len(kwargs))), _pytree.tree_flatten(dict.fromkeys(kwargs, 0))[1])
    return sorted(numbered, key=lambda name: numbered[name])


def _positional(module: nn.Module, count: int) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(module.forward).parameters.values()
        names = [parameter.name for parameter in parameters if parameter.kind in kinds]
    except (TypeError, ValueError):
        names = []
    return [names[number] if number < len(names) else f"input_{number}" for number in range(count)]
