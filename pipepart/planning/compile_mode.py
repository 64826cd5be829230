"""The option `compile` and its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pipepart.errors import ConfigError
from pipepart.values import shortened

__all__ = ["CompileOption", "CompileSettings"]

CompileOption = bool | Literal["auto"] | Mapping[str, Any]
"""Whether chunks are compiled, ``auto`` (if that wins time), or a mapping with options of `torch.compile`."""

_BACKENDS = ("inductor", "aot_eager")
_MODES = ("default", "max-autotune-no-cudagraphs")
_KNOWN = ("backend", "fullgraph", "mode", "options")


@dataclass(frozen=True)
class CompileSettings:
    """How chunks are compiled, after a check of the option."""

    backend: str = "inductor"
    """``inductor``; or ``aot_eager``, which runs the divided graphs op by op (to find faults)."""
    whole: bool = False
    """Whether a part of a chunk that cannot be compiled is an error."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings of inductor that differ from its defaults."""
    trial: bool = False
    """Whether a trial during the run decides if chunks are compiled."""

    @classmethod
    def of(cls, option: CompileOption) -> CompileSettings | None:
        """Return the settings of a value of the option; None if nothing is compiled."""
        if option is False:
            return None
        if option is True:
            return cls()
        if option == "auto":
            return cls(trial=True)
        if not isinstance(option, Mapping):
            raise ConfigError(
                f"compile={shortened(option)} is not known: expected True, False, 'auto', or options of torch.compile, "
                f"{', '.join(_KNOWN)}."
            )
        unknown = [name for name in option if name not in _KNOWN]
        if unknown:
            reason = {
                "dynamic": "each size of a micro-batch is compiled on its own",
                "disable": "compile=False compiles nothing",
            }
            why = reason.get(str(unknown[0]), f"expected some of {', '.join(_KNOWN)}")
            raise ConfigError(f"compile: the option {shortened(unknown[0])} cannot be given: {why}.")
        given: dict[str, Any] = {"backend": "inductor", "fullgraph": False, "mode": "default", "options": {}}
        given |= {name: value for name, value in option.items() if value is not None}
        for name, words in (("backend", _BACKENDS), ("mode", _MODES), ("fullgraph", (True, False))):
            if given[name] not in words:
                text = (
                    " Graphs of CUDA would overwrite the activations of earlier micro-batches."
                    if name == "mode"
                    else ""
                )
                raise ConfigError(
                    f"compile: {name} is {shortened(given[name])}; expected one of {', '.join(map(repr, words))}.{text}"
                )
        if not isinstance(given["options"], Mapping):
            raise ConfigError(
                f"compile: options is {shortened(given['options'])}; expected a mapping of settings of inductor."
            )
        config = {"max_autotune": True} if given["mode"] != "default" else {}
        config |= {str(name).replace("-", "_"): value for name, value in given["options"].items()}
        if config.get("triton.cudagraphs"):
            raise ConfigError(
                "compile: options has triton.cudagraphs, which cannot be used: graphs of CUDA would overwrite the activations "
                "of earlier micro-batches."
            )
        return cls(given["backend"], given["fullgraph"], config)
