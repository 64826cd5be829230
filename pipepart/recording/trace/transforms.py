"""``torch.func``: a call of a function that ``vmap``, ``grad``, ``jvp``, ``jacrev`` etc. have transformed is one op.

Tensors inside such a call are wrapped, so its ops cannot be recorded one by one. The function may use parameters of the
model and, through variables around it, tensors and sizes that were computed before: both become arguments of the op.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn

from pipepart.recording.trace.failures import NotRecordable
from pipepart.recording.trace.functions import places_of
from pipepart.recording.trace.recorder import Recorder
from pipepart.recording.trace.symbols import is_tracked
from pipepart.recording.trace.tensors import unwrap

__all__ = ["replacements"]

_apis: Any = importlib.import_module("torch._functorch.apis")
_eager: Any = importlib.import_module("torch._functorch.eager_transforms")
_torch_functional_call = torch.func.functional_call
_NESTED = 4
"""Depth of nesting to which functions are searched for variables around them."""


def replacements(recorder: Recorder) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield the patches under which calls of transformed functions are recorded: namespace, name and new value."""
    inner: tuple[tuple[Any, str, Callable[..., Any], tuple[Any, ...]], ...] = (
        (_apis, "vmap_impl", _vmap, ()),
        (_eager, "grad_impl", _grad, ("grad",)),
        (_eager, "grad_and_value_impl", _grad, ("value",)),
        (_eager, "_jvp_with_argnums", _jvp, ()),
    )
    for file, name, call, more in inner:
        yield vars(file), name, functools.partial(call, recorder, *more, getattr(file, name))
    originals = {name: getattr(torch.func, name) for name in ("jacrev", "jacfwd", "hessian", "vjp", "functional_call")}
    calls = {"functional_call": _functional_call, "vjp": _vjp}
    for names, name in places_of(originals):
        call = calls.get(name) or functools.partial(_jacobian, name)
        yield names, name, functools.partial(call, recorder, originals[name])


def _vmap(
    recorder: Recorder,
    original: Any,
    function: Any,
    in_dims: Any,
    out_dims: Any,
    randomness: Any,
    size: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    def run(inner: Any, *values: Any, **more: Any) -> Any:
        return original(inner, in_dims, out_dims, randomness, size, *values, **more)

    return _one_op(recorder, f"vmap_{in_dims}_{out_dims}_{randomness}_{size}", run, function, args, kwargs)


def _grad(
    recorder: Recorder, kind: str, original: Any, function: Any, argnums: Any, has_aux: bool, args: Any, kwargs: Any
) -> Any:
    def run(inner: Any, *values: Any, **more: Any) -> Any:
        return original(inner, argnums, has_aux, values, more)

    return _one_op(recorder, f"grad_{kind}_{argnums}", run, function, args, kwargs)


def _jvp(
    recorder: Recorder, original: Any, function: Any, primals: Any, tangents: Any, argnums: Any, **options: Any
) -> Any:
    def run(inner: Any, *values: Any) -> Any:
        return original(inner, *values, argnums, **options)

    return _one_op(recorder, f"jvp_{argnums}", run, function, (primals, tangents), {})


def _jacobian(name: str, recorder: Recorder, original: Any, function: Any, *settings: Any, **options: Any) -> Any:
    def run(inner: Any, *values: Any, **more: Any) -> Any:
        return original(inner, *settings, **options)(*values, **more)

    def call(*args: Any, **kwargs: Any) -> Any:
        return _one_op(recorder, f"{name}_{settings}", run, function, args, kwargs)

    return call


def _vjp(recorder: Recorder, original: Any, function: Any, *primals: Any, has_aux: bool = False) -> Any:
    """Record the value as one op, and each call of the returned function as another, which computes the value again."""
    if recorder.builder.idle:
        return original(function, *unwrap(primals), has_aux=has_aux)

    def value(inner: Any, *values: Any) -> Any:
        result = original(inner, *values, has_aux=has_aux)
        return (result[0], result[2]) if has_aux else result[0]

    def pull_back(inner: Any, values: Any, cotangents: Any, more: Any) -> Any:
        return original(inner, *values, has_aux=has_aux)[1](*cotangents, **more)

    def pulled(*cotangents: Any, **more: Any) -> Any:
        return _one_op(recorder, "vjp", pull_back, function, (primals, cotangents, more), {})

    out = _one_op(recorder, "vjp_value", value, function, primals, {})
    if next(reversed(recorder.facts.values())).random:
        raise NotRecordable(f"torch.func.vjp of a function that draws random numbers, in {recorder.builder.here()}")
    return (out[0], pulled, out[1]) if has_aux else (out, pulled)


def functional_call(module: nn.Module, tensors: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``torch.func.functional_call`` with copies of the dictionaries: those of a graph cannot be changed."""
    copies = tuple(map(dict, tensors)) if isinstance(tensors, (tuple, list)) else dict(tensors)
    return _torch_functional_call(module, copies, *args, **kwargs)


def _functional_call(recorder: Recorder, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Record a module with other tensors in place of its parameters as one op with the module as an argument."""
    if recorder.builder.idle:
        return original(module, *unwrap(args), **unwrap(kwargs))
    if "parameter_and_buffer_dicts" in kwargs:
        args = (kwargs.pop("parameter_and_buffer_dicts"), *args)
    path = recorder.builder.module_names.get(id(module))
    return recorder.run_whole(
        functional_call,
        "call_function",
        functional_call,
        (module, *args),
        kwargs,
        prefix=path,
        own=[buffer for buffer in module.buffers() if path is not None],
    )


def _one_op(
    recorder: Recorder, name: str, run: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Record ``run(function, *args, **kwargs)`` as one op."""
    if recorder.builder.idle:
        return run(function, *unwrap(args), **unwrap(kwargs))
    found = _around(function, recorder)

    def whole(around: tuple[Any, ...], *values: Any, uses: Any = (), **more: Any) -> Any:
        new = {id(old): value for old, value in zip(found, around)}
        return run(_rebuilt(function, new) if new else function, *values, **more)

    short = f"{name.partition('_')[0]}_{getattr(function, '__name__', type(function).__name__)}"
    whole.__name__ = whole.__qualname__ = "".join(c for c in short if c.isalnum() or c == "_")
    whole.stable_name = f"{name}_{getattr(function, '__qualname__', short)}"  # type: ignore[attr-defined]
    return recorder.run_whole(whole, "call_function", whole, (tuple(found), *args), kwargs, borrows=True)


def _around(function: Any, recorder: Recorder) -> list[Any]:
    """Return the recorded tensors and tracked numbers in the variables around a function and in its defaults."""
    found: dict[int, Any] = {}

    def look(value: Any, depth: int) -> None:
        if is_tracked(value) or (isinstance(value, torch.Tensor) and id(value) in recorder.values):
            if id(value) not in recorder.tensor_names:
                found[id(value)] = value
        elif depth:
            for part in _parts(value):
                look(part, depth - 1)

    look(function, _NESTED)
    return list(found.values())


def _parts(value: Any) -> list[Any]:
    if isinstance(value, types.FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if type(value) in (list, tuple):
        return list(value)
    return list(value.values()) if type(value) is dict else []


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _rebuilt(value: Any, new: dict[int, Any], depth: int = _NESTED) -> Any:
    """Return `value` with other tensors and numbers in the variables around it; `value` itself if it has none."""
    if id(value) in new:
        return new[id(value)]
    if not depth:
        return value
    if isinstance(value, types.FunctionType):
        contents = [_rebuilt(_content(cell), new, depth - 1) for cell in value.__closure__ or ()]
        defaults = tuple(_rebuilt(item, new, depth - 1) for item in value.__defaults__ or ()) or None
        cells = tuple(
            cell if content is _content(cell) else types.CellType(content)
            for cell, content in zip(value.__closure__ or (), contents)
        )
        made = types.FunctionType(value.__code__, value.__globals__, value.__name__, defaults, cells or None)
        named = {key: _rebuilt(item, new, depth - 1) for key, item in (value.__kwdefaults__ or {}).items()}
        made.__kwdefaults__ = named or None
        return made
    if isinstance(value, functools.partial):
        args = [_rebuilt(item, new, depth - 1) for item in value.args]
        named = {key: _rebuilt(item, new, depth - 1) for key, item in value.keywords.items()}
        return functools.partial(_rebuilt(value.func, new, depth - 1), *args, **named)
    if type(value) in (list, tuple):
        return type(value)(_rebuilt(item, new, depth - 1) for item in value)
    if type(value) is dict:
        return {key: _rebuilt(item, new, depth - 1) for key, item in value.items()}
    return value
