"""The option `head`: how a linear layer whose scores end in a cross-entropy is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pipepart.errors import ConfigError, did_you_mean
from pipepart.values import Range, check_number, shortened

__all__ = ["HeadMode", "HeadOption"]

HeadOption = Literal["auto", "whole", "sliced"] | Mapping[str, int]
"""``auto``, ``whole``, ``sliced``, or a mapping with the tokens of a ``slice``."""

_MOST = 2**24
_WORDS = ("auto", "whole", "sliced")


@dataclass(frozen=True)
class HeadMode:
    """The value of the option, after a check."""

    mode: str
    tokens: int | None = None
    """Tokens of a slice. None: chosen by the size of the vocabulary."""

    @property
    def looks_for_heads(self) -> bool:
        """Whether a head may run in slices."""
        return self.mode != "whole"

    @staticmethod
    def of(option: Any) -> HeadMode:
        """Read the option. A `ConfigError` names what is wrong."""
        if isinstance(option, Mapping):
            for name in option:
                if name != "slice":
                    raise ConfigError(f"head.{shortened(name)} is not known: {did_you_mean(str(name), ('slice',))}")
            if "slice" not in option:
                raise ConfigError("head={} has no slice: expected the tokens of one, as in {'slice': 256}")
            check_number("head.slice", option["slice"], Range(1, _MOST), whole=True)
            return HeadMode("sliced", int(option["slice"]))
        if option not in _WORDS:
            raise ConfigError(
                f"head={shortened(option)} is not known: expected {', '.join(map(repr, _WORDS))}, or a mapping"
            )
        return HeadMode(str(option))
