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

from pipepart.recording.recorded_run.failures import NotRecordable
from pipepart.recording.recorded_run.functions import places_of
from pipepart.recording.recorded_run.recorder import Recorder
from pipepart.recording.recorded_run.symbols import is_tracked
from pipepart.recording.recorded_run.tensors import unwrap

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
        return run(_mapped(function, lambda value: new.get(id(value))) if new else function, *values, **more)

    short = f"{name.partition('_')[0]}_{getattr(function, '__name__', type(function).__name__)}"
    whole.__name__ = whole.__qualname__ = "".join(c for c in short if c.isalnum() or c == "_")
    whole.stable_name = f"{name}_{getattr(function, '__qualname__', short)}"  # type: ignore[attr-defined]
    return recorder.run_whole(whole, "call_function", whole, (tuple(found), *args), kwargs, borrows=True)


def _around(function: Any, recorder: Recorder) -> list[Any]:
    """Return the recorded tensors and tracked numbers in the variables around a function and in its defaults."""
    found: dict[int, Any] = {}

    def collect(value: Any) -> Any:
        recorded = is_tracked(value) or (isinstance(value, torch.Tensor) and id(value) in recorder.values)
        return found.setdefault(id(value), value) if recorded and id(value) not in recorder.tensor_names else None

    _mapped(function, collect)
    return list(found.values())


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _mapped(value: Any, change: Callable[[Any], Any], depth: int = _NESTED) -> Any:
    """Return a function, or a container, with changed values in the variables around it and in its defaults.

    `change` returns the new value of a variable, or None to leave it as it is, or to look into it.
    """
    new = change(value)
    if new is not None or not depth:
        return value if new is None else new
    inner = functools.partial(_mapped, change=change, depth=depth - 1)
    if isinstance(value, types.FunctionType):
        cells = []
        for cell in value.__closure__ or ():
            content = inner(_content(cell))
            cells.append(cell if content is _content(cell) else types.CellType(content))
        defaults = tuple(map(inner, value.__defaults__ or ())) or None
        made = types.FunctionType(value.__code__, value.__globals__, value.__name__, defaults, tuple(cells) or None)
        made.__kwdefaults__ = {key: inner(item) for key, item in (value.__kwdefaults__ or {}).items()} or None
        return made
    if isinstance(value, functools.partial):
        function, args = inner(value.func), map(inner, value.args)
        return functools.partial(function, *args, **{key: inner(item) for key, item in value.keywords.items()})
    if type(value) in (list, tuple):
        return type(value)(map(inner, value))
    return {key: inner(item) for key, item in value.items()} if type(value) is dict else value
