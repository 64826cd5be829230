"""Keys and tokens have no place in files: configuration is written and shown without them."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["HIDDEN", "redacted", "redacted_override"]

HIDDEN = "***"

_NAMES = re.compile(
    r"(^|[_.-])(api_?key|access_?key|private_?key|secret(_key)?|password|passwd|passphrase|credentials?|auth|token|bearer)$",
    re.IGNORECASE,
)
_VALUES = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|local-[0-9a-f]{40}|(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f]))"
)
_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")  # user:password in an address


def redacted(value: Any, name: str = "") -> Any:
    """A copy without the values of secret names, and without anything that looks like a key."""
    if isinstance(value, dict):
        return {key: redacted(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted(inner, name) for inner in value]
    if value is not None and not isinstance(value, bool) and _NAMES.search(name):
        return HIDDEN
    if isinstance(value, str):
        return _LOGIN.sub(HIDDEN, _VALUES.sub(HIDDEN, value))
    return value


def redacted_override(text: str) -> str:
    """The same for `key=value` of the command line."""
    key, mark, value = text.partition("=")
    return f"{key}{mark}{redacted(value, key.rsplit('.', 1)[-1])}" if mark else text
