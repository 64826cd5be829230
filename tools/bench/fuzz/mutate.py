"""Mutations of documents and texts, junk values, and the search for a smaller case."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["JUNK", "garbled", "junk", "mutated", "shrunk", "smaller"]

JUNK: list[Any] = [
    None, True, False, -1, 0, 1, 2, 7, 99, 65_536, 65_537, 10**9, 2**53, 2**53 + 1, 2**63, 10**30, -0.5, 0.5, 1.0, 1e300,
    1e308, math.inf, -math.inf, math.nan, 1e-320, "", "x", "auto", "1f1b", "gpipe", "no.csv", "no.json", "\0", "\x1b[31m",
    "\ud800", "x" * 300, "../..", "/dev/zero", "[" * 50, [], [[]], [0], [-1], [99], [math.nan], {}, {"a": 1}, [["a", "b"]],
    [None] * 3, [[0, 1, 2]], {"": {"": []}}, [1e308] * 4, {"_target_": "os.system"}, "${oc.env:HOME}",
]  # fmt: skip
"""Values that a careless reader takes for valid ones, or fails on."""

_PIECES = [
    b"", b"[", b"]", b"{", b"}", b",", b":", b'"', b"'", b"\n", b"\t", b" ", b"-", b"0", b"9" * 20, b"9" * 5000, b"1e999",
    b"NaN", b"-Infinity", b"null", b"true", b"\x00", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\x1b[2J", b"&a ", b"*a",
    b"!!python/object:os.system ", b"${oc.env:HOME}", b"<<: ", b"---", b"- ", b"(", b")OVERLAP_F_B", b";", b"=", b" -- ",
    b"[" * 3000, b'{"a":' * 300, b"F", b"SEND_F", b"\xe2\x80\xae",
]  # fmt: skip


def junk(draw: random.Random, depth: int = 2) -> Any:
    """A value of any type: one of `JUNK`, a number of any size, or a container of such values."""
    how = draw.random()
    if how < 0.6 or depth == 0:
        return draw.choice(JUNK)
    if how < 0.75:
        return draw.randrange(-(10**3), 10**3) if draw.random() < 0.5 else draw.randrange(10 ** draw.randrange(1, 40))
    if how < 0.85:
        return draw.uniform(-1, 1) * 10.0 ** draw.randrange(-320, 308)
    if how < 0.93:
        return [junk(draw, depth - 1) for _ in range(draw.randrange(4))]
    return {draw.choice(["", "a", "stages", "_target_", "\0"]): junk(draw, depth - 1) for _ in range(draw.randrange(3))}


def mutated(document: Any, draw: random.Random) -> Any:
    """The document with one value somewhere replaced, left out, doubled, moved or added. The original stays as it is."""
    if not isinstance(document, (dict, list)) or not document or draw.random() < 0.01:
        return junk(draw)
    copied: Any = document.copy()
    key = draw.choice(list(copied)) if isinstance(copied, dict) else draw.randrange(len(copied))
    inner = copied[key]
    if isinstance(inner, (dict, list)) and inner and draw.random() < 0.75:
        copied[key] = mutated(inner, draw)
        return copied
    how = draw.randrange(6)
    if how == 0:
        del copied[key]
    elif how == 1 and isinstance(copied, list):
        copied.insert(key, draw.choice([inner, junk(draw)]))
    elif how == 1:
        copied[draw.choice(["extra", "", key + "x", "\x1b", "version"])] = junk(draw)
    elif how == 2:
        other = draw.choice(list(copied)) if isinstance(copied, dict) else draw.randrange(len(copied))
        copied[key], copied[other] = copied[other], inner
    elif how == 3 and isinstance(inner, (int, float)):
        copied[key] = draw.choice([-inner, inner + 1, inner - 1, inner * 10**6, inner / 3, str(inner), [inner]])
    else:
        copied[key] = junk(draw)
    return copied


def garbled(text: bytes, draw: random.Random) -> bytes:
    """The text with some of its bytes left out, doubled, replaced or added."""
    for _ in range(draw.randrange(1, 4)):
        start = draw.randrange(len(text) + 1)
        end = min(len(text), start + draw.choice([0, 1, 1, 2, 5, 30, 1000]))
        how = draw.randrange(4)
        if how == 0:
            text = text[:start] + text[end:]
        elif how == 1:
            text = text[:end] + text[start:]
        elif how == 2:
            text = text[:start] + draw.choice(_PIECES) + text[end:]
        else:
            text = text[:start] + draw.randbytes(end - start) + text[end:]
    return text


def smaller(value: Any) -> Iterator[Any]:
    """Values that are a step smaller, the smallest first."""
    if isinstance(value, (str, bytes)):
        size = len(value) // 2
        while size:
            yield from (value[:at] + value[at + size :] for at in range(0, len(value), size))
            size //= 2
    elif isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            without = value.copy()
            del without[key]
            yield without
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            for inner in smaller(value[key]):
                changed = value.copy()
                changed[key] = inner
                yield changed


def shrunk(value: Any, fails: Callable[[Any], bool], tries: int = 500) -> Any:
    """A smaller value that still fails."""
    again = True
    while again and tries > 0:
        again = False
        for candidate in smaller(value):
            tries -= 1
            if tries <= 0:
                break
            if fails(candidate):
                value, again = candidate, True
                break
    return value
