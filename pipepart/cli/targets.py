"""What a configuration may build. A `_target_` names a class; only those of known packages are taken.

Configuration travels between people, so it must not be able to run whatever it names: the name has to lie in an allowed
package, and the thing it leads to has to be defined there (`recipes.gpt.torch.load` is not). Keys and types are checked
against the signature before anything is started.
"""

from __future__ import annotations

import importlib
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from pipepart.errors import ConfigError, did_you_mean

__all__ = ["ALLOWED", "build", "check_call", "check_targets", "locate"]

ALLOWED = ("pipepart", "recipes", "torch.optim", "lightning")
"""Packages that `_target_` may name; `allow=[my_package]` adds to them."""

_OWN = ("_target_", "_partial_")
_MOVED = {"pipepart.strategy.": "pipepart.lightning.", "pipepart.report.tracking.": "pipepart.lightning.tracking."}
"""Old beginning of a name -> new one, for configurations that were written before."""


def locate(name: str, allow: Sequence[str] = (), where: str = "_target_") -> Callable[..., Any]:
    """The class or function of that name, if it is one of an allowed package."""
    packages = (*ALLOWED, *allow)
    for old, new in _MOVED.items():
        if isinstance(name, str) and name.startswith(old):
            name = new + name.removeprefix(old)
    if not isinstance(name, str) or not any(_inside(name, package) for package in packages):
        raise ConfigError(
            f"{where} is {name!r}, which lies in none of the allowed packages ({', '.join(packages)}). "
            f"If it is yours, add its package: allow=[{str(name).split('.')[0]}]"
        )
    found = _import(name, where)
    home = getattr(found, "__module__", None) or ""
    if not callable(found) or not any(_inside(home, package) for package in packages):
        raise ConfigError(f"{where} is {name!r}, which is not defined in an allowed package ({home or 'no class'})")
    if not inspect.isclass(found) and any(_inside(home, package) for package in ("torch", "lightning", "pipepart")):
        raise ConfigError(
            f"{where} is {name!r}, which is not a class; only classes of {home.split('.')[0]} can be built"
        )
    return found


def _inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _import(name: str, where: str) -> Any:
    """`a.b.C` by importing the longest part that is a module; a missing name says which names there are."""
    parts = name.split(".")
    if not all(part.isidentifier() and not part.startswith("_") for part in parts):
        raise ConfigError(f"{where} is {name!r}; expected package.module.Class without leading underscores")
    for count in range(len(parts), 0, -1):
        path = ".".join(parts[:count])
        try:
            found: Any = importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is not None and not _inside(path, error.name):  # it is there, but something it needs is not
                raise ConfigError(
                    f"{where} is {name!r}, which needs the package {error.name!r}: pip install {error.name}"
                ) from error
            continue
        for part in parts[count:]:
            if not hasattr(found, part):
                known = getattr(found, "__all__", None) or [word for word in vars(found) if not word.startswith("_")]
                raise ConfigError(f"{where} is {name!r}, but there is no {part!r}: {did_you_mean(part, known)}")
            found = getattr(found, part)
        return found
    raise ConfigError(f"{where} is {name!r}, but there is no package {parts[0]!r} here")


def targets(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every mapping with a `_target_`, wherever it is, with its key."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield path, node
        for key, inner in node.items():
            yield from targets(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list):
        for index, inner in enumerate(node):
            yield from targets(inner, f"{path}[{index}]")


def check_targets(config: Mapping[str, Any], later: Mapping[str, Sequence[str]] | None = None) -> None:
    """Refuse, before anything is started, what cannot be built. `later` names arguments that are given when building."""
    allow = tuple(config.get("allow") or ())
    for path, node in targets(dict(config)):
        function = locate(node["_target_"], allow, f"{path}._target_")
        given = {key: value for key, value in node.items() if key not in _OWN}
        filled = (later or {}).get(path, ())
        check_call(function, given, path, filled, partly=bool(node.get("_partial_")))


def check_call(
    function: Callable[..., Any], given: Mapping[str, Any], path: str, filled: Sequence[str] = (), partly: bool = False
) -> None:
    """Whether a call with these keyword arguments fits the signature; `filled` come later, `partly` positional ones too."""
    parameters = inspect.signature(function).parameters
    hints = _hints(function)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {key: p for key, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    title = getattr(function, "__name__", str(function))
    for key, value in given.items():
        if key not in named:
            if open_ended:
                continue
            raise ConfigError(f"{path}.{key}: {title} takes no {key!r}; {did_you_mean(key, named)}")
        if isinstance(value, dict) and "_target_" in value:
            continue
        if not fits(value, hints.get(key, Any)):
            raise ConfigError(f"{path}.{key}: expected {_shown(hints[key])}, got {value!r} ({type(value).__name__})")
    if partly:
        return
    missing = [key for key, p in named.items() if p.default is p.empty and key not in given and key not in filled]
    if missing:
        raise ConfigError(f"{path}.{missing[0]} is missing: {title} needs it")


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)  # type: ignore[misc]
    except Exception:  # annotations that only a type checker can read
        return {}


def fits(value: Any, annotation: Any) -> bool:
    """Whether a value of a YAML file may stand for a type; types that YAML cannot hold are left to the callee."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is None or annotation is type(None):
        return value is None
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in arguments)
    if origin is typing.Literal:
        return value in arguments
    if annotation is bool or annotation is str:
        return isinstance(value, annotation)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if annotation is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if origin in (list, set, Sequence) or annotation in (list, set):
        return isinstance(value, list) and all(fits(item, arguments[0]) for item in value if arguments)
    if origin is tuple or annotation is tuple:
        inner = arguments[:1] * len(value) if isinstance(value, list) and arguments[1:] == (...,) else arguments
        return isinstance(value, list) and (not inner or (len(inner) == len(value) and all(map(fits, value, inner))))
    if origin in (dict, Mapping) or annotation is dict:
        return isinstance(value, dict)
    return True


def _shown(annotation: Any) -> str:
    return annotation.__name__ if inspect.isclass(annotation) else str(annotation).replace("typing.", "")


def build(node: Mapping[str, Any], allow: Sequence[str] = (), path: str = "", **more: Any) -> Any:
    """Make what a checked mapping describes, inner ones first. `_partial_: true` gives a function that wants the rest."""
    function = locate(node["_target_"], allow, f"{path}._target_")
    arguments = {key: _built(value, allow, f"{path}.{key}") for key, value in node.items() if key not in _OWN}
    arguments.update(more)
    return partial(function, **arguments) if node.get("_partial_") else function(**arguments)


def _built(value: Any, allow: Sequence[str], path: str) -> Any:
    if isinstance(value, dict):
        if "_target_" in value:
            return build(value, allow, path)
        return {key: _built(inner, allow, f"{path}.{key}") for key, inner in value.items()}
    if isinstance(value, list):
        return [_built(inner, allow, f"{path}[{index}]") for index, inner in enumerate(value)]
    return value
