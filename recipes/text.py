"""Text to learn from that needs no download: short made-up stories, the same ones on every machine."""

from __future__ import annotations

import random

__all__ = ["story"]

_PEOPLE = ["Ada", "Bruno", "Chiara", "Dimitri", "Esi", "Farid", "Greta", "Hana", "Ivo", "Jun"]
_THINGS = ["lantern", "kettle", "ladder", "violin", "map", "wheel", "basket", "mirror", "rope", "clock"]
_PLACES = ["harbour", "orchard", "library", "mill", "station", "garden", "tower", "market"]
_DEEDS = ["carried", "mended", "painted", "hid", "found", "sold", "polished", "borrowed"]
_MOODS = ["slowly", "gladly", "in silence", "without a word", "before noon", "once again", "by candlelight"]


def _sentence(rng: random.Random, who: str) -> str:
    thing, place = rng.choice(_THINGS), rng.choice(_PLACES)
    forms = [
        f"{who} {rng.choice(_DEEDS)} the {thing} in the {place} {rng.choice(_MOODS)}.",
        f"In the {place}, {who} {rng.choice(_DEEDS)} a {thing}.",
        f"'Where is my {thing}?' asked {who}. '{rng.choice(_PEOPLE)} has it,' said {rng.choice(_PEOPLE)}.",
        f"The {thing} of {who} stood in the {place} for {rng.randint(2, 40)} days.",
    ]
    return rng.choice(forms)


def story(characters: int, seed: int = 0) -> str:
    """About that many characters of paragraphs, each about one person."""
    rng = random.Random(seed)
    parts: list[str] = []
    length = 0
    while length < characters:
        who = rng.choice(_PEOPLE)
        paragraph = " ".join(_sentence(rng, who) for _ in range(rng.randint(2, 6))) + "\n"
        parts.append(paragraph)
        length += len(paragraph)
    return "".join(parts)[:characters]
