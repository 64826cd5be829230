"""Secrets (keys, tokens, passwords): found by name, by value and by form, and hidden from everything that is written.

By name: the values of keys such as `api_key`, `hfToken` or `pwd` in a configuration. By value: the values of environment
variables with such names, and those that were found by name, wherever they appear. By form: keys of known services.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["HIDDEN", "clean", "clean_output", "is_secret", "redacted", "redacted_override", "write_private"]

HIDDEN = "***"

_LAST = (
    "token", "tokens", "password", "passwords", "passwd", "passphrase", "secret", "secrets", "credential", "credentials",
    "bearer", "apikey", "apikeys", "accesskey", "secretkey", "privatekey", "authorization", "passcode", "cookie", "cookies",
)  # fmt: skip
"""Ends of the last word of a secret name."""
_WHOLE = ("pwd", "auth", "pat", "pass")
"""Last words of secret names."""
_FOLDERS = ("PWD", "OLDPWD")
"""Environment variables of the shell that hold folders."""
_KEYS = (
    "api",
    "access",
    "private",
    "secret",
    "signing",
    "encryption",
    "account",
    "ssh",
    "master",
    "service",
    "license",
)
"""Words before `key` in a secret name."""
_COUNTED = ("max", "min", "num", "n", "new", "pad", "eos", "bos", "unk", "sep", "cls", "mask", "special", "stop")
"""Words before `token` in the names of tokens of text."""
_FORMS = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{16,}|(?:sk|pk|rk)[-_][A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}"
    r"|github_pat_\w{20,}|gl[a-z]{2,5}-[A-Za-z0-9_-]{16,}|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[A-Za-z0-9_-]{30,}"
    r"|xox[abeprs]-[A-Za-z0-9-]{10,}|(?:npm|dop_v1|wandb_v1|nvapi)[-_][A-Za-z0-9_-]{16,}|pypi-[A-Za-z0-9_-]{16,}"
    r"|ya29\.[A-Za-z0-9_-]{16,}|SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"
    r"|(?:local-)?[0-9a-f]{40}(?![0-9a-f]))",
    re.DOTALL,
)
_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")  # user:password in an address
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_ENTRY = re.compile(r"(?:^|(?<=[\s,{\[+~'\"]))([\w./@-]+)['\"]?\s*[:=]\s*")
_NUMBER = re.compile(r"[-+]?[\d_.]+(?:e[-+]?\d+)?|true|false|null|none|", re.IGNORECASE)
_LEAST = 6
"""Characters of the shortest value that is hidden wherever it appears."""

_found: set[str] = set()
"""Values that were found by name."""


@cache
def is_secret(name: str) -> bool:
    """Whether a key or a variable of that name holds a secret."""
    words = [word.lower() for word in _WORDS.findall(re.split(r"[./@]", name)[-1])]
    if words[1:] and words[-1] == "v":  # of a version: TOKEN_V2
        words.pop()
    if not words:
        return False
    before, last = words[-2] if len(words) > 1 else "", words[-1]
    if last in ("key", "keys"):
        return before in _KEYS
    return last in _WHOLE or (last.endswith(_LAST) and before not in _COUNTED)


def _hides(name: str, value: Any) -> bool:
    """Whether a value of that name is hidden; a number of `tokens`, a flag and an empty value are not."""
    if not is_secret(name) or value is None or isinstance(value, bool):
        return False
    counted = _WORDS.findall(name)[-1].lower().endswith(("token", "tokens"))
    if not isinstance(value, str):
        return not counted
    return not (_NUMBER.fullmatch(value) if counted else value.lower() in ("", "true", "false", "null", "none"))


def _known() -> list[str]:
    """Values to hide wherever they appear, the longest first, as they are and as `repr` writes them."""
    named = (value for name, value in os.environ.items() if is_secret(name) and name not in _FOLDERS)
    values = {value.strip() for value in (*named, *_found)}
    return sorted({text for v in values if len(v) >= _LEAST for text in (v, repr(v)[1:-1])}, key=len, reverse=True)


def clean(text: str) -> str:
    """The text without values that are known to be secret, without keys of known services and without logins."""
    for value in _known():
        text = text.replace(value, HIDDEN)
    return _LOGIN.sub(HIDDEN, _FORMS.sub(HIDDEN, text))


def redacted(value: Any, name: str = "") -> Any:
    """A copy of a configuration without secrets. Everything below a secret name is hidden."""
    _remember(value, name)
    return _redacted(value, name)


def _remember(value: Any, name: str) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _remember(inner, name if is_secret(name) else str(key))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _remember(inner, name)
    elif isinstance(value, str) and _hides(name, value):
        _found.add(value.strip())


def _redacted(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {
            clean(key) if isinstance(key, str) else key: _redacted(inner, name if is_secret(name) else str(key))
            for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_redacted(inner, name) for inner in value]
    if _hides(name, value):
        return HIDDEN
    return clean(value) if isinstance(value, str) else value


def redacted_override(text: str) -> str:
    """`key=value` of the command line without secrets, including those inside of lists and mappings."""
    key, mark, value = text.partition("=")
    if mark and _hides(key, value):
        _remember([part.strip(" '\"") for part in (value, *value.split(","))], key)
        return f"{key}={HIDDEN}"
    parts, at = [], 0
    for entry in _ENTRY.finditer(text):
        end = _end_of_value(text, entry.end())
        found = text[entry.end() : end].strip().strip("'\"")
        if entry.start() >= at and _hides(entry[1], found):
            _remember(found, entry[1])
            parts += [text[at : entry.end()], HIDDEN]
            at = end
    return clean("".join(parts) + text[at:])


def _end_of_value(text: str, start: int) -> int:
    """The end of the value that begins at `start`: its closing quote, or the comma or bracket that follows it."""
    quote = text[start : start + 1] if text[start : start + 1] in ("'", '"') else ""
    depth, at = 0, start + len(quote)
    while at < len(text):
        character = text[at]
        if character == "\\":
            at += 1
        elif quote:
            if character == quote:
                return at + 1
        elif depth == 0 and character in ",}]":
            return at
        else:
            depth += (character in "{[") - (character in "}]")
        at += 1
    return len(text)


class _CleanStream:
    """A text stream that hides secrets in the text that is written to it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return int(self._stream.write(clean(text)) or 0)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def clean_output() -> Iterator[None]:
    """Hide secrets in everything that this process prints."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _CleanStream(before[0]), _CleanStream(before[1])  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
