"""Names of modules with control characters reach neither the terminal nor a picture as they are."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

from report_samples import sample_plan

from pipepart.report import plan_text
from pipepart.report.svg import static_svg
from pipepart.values import printable

NAME = "blocks\x1b[2J\x07.0\n\x00\ud800\u202e\x9b31m"


def test_control_characters_are_written_out() -> None:
    plan = sample_plan(stages=2)
    plan = replace(plan, chunks=tuple(replace(chunk, first=NAME, last=NAME + "x") for chunk in plan.chunks))
    text = plan_text(plan)
    assert not set("\x1b\x07\x00\ud800\u202e\x9b") & set(text)
    assert "\\x1b" in text or "\\x00" in text
    assert len(text.splitlines()) == len(plan_text(sample_plan(stages=2)).splitlines())
    picture = static_svg(plan, title="a\x1b[31mb\x00\ud800")
    ElementTree.fromstring(picture.encode("utf-8"))


def test_other_characters_stay() -> None:
    assert printable("gebäude.層.0 — ok") == "gebäude.層.0 — ok"
    assert printable("a\nb\x1b", keep="\n") == "a\nb\\x1b"
