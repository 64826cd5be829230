"""Visits of a stage to its chunks: what is borrowed is there when it is used, and given back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipepart.schedule import Visit, visits_of


def test_the_picture() -> None:
    chunks, names = [0, 0, 1, 1, 1, 1, 0, 0], {0: ["a", "tied"], 1: ["b", "tied"]}
    assert visits_of(chunks, names, once=False) == (
        Visit(0, 1, ("a", "tied"), ("a",)),
        Visit(2, 5, ("b",), ("b",)),
        Visit(6, 7, ("a",), ("tied", "a")),
    )
    assert [visit.borrowed for visit in visits_of(chunks, names, once=True)] == [("a", "tied"), ("b",), ()]
    assert [visit.returned for visit in visits_of(chunks, names, once=True)] == [(), ("b",), ("a", "tied")]
    assert visits_of([], {}, once=True) == ()


@given(
    st.lists(st.integers(0, 3), max_size=24),
    st.dictionaries(st.integers(0, 3), st.lists(st.sampled_from("abcdef"), unique=True), min_size=4),
    st.booleans(),
)
def test_every_action_has_its_parameters_and_nothing_stays(
    chunks: list[int], names: dict[int, list[str]], once: bool
) -> None:
    visits = visits_of(chunks, names, once)
    assert [place for visit in visits for place in range(visit.first, visit.last + 1)] == list(range(len(chunks)))
    held: set[str] = set()
    came: list[str] = []
    for number, visit in enumerate(visits):
        assert not held & set(visit.borrowed)
        held |= set(visit.borrowed)
        came += visit.borrowed
        used = {name for place in range(visit.first, visit.last + 1) for name in names[chunks[place]]}
        assert used <= held
        if not once:  # nothing of chunks before the last one stays
            assert held <= used | set(visit.returned)
        if number + 1 < len(visits):  # its transfers set off now
            assert not set(visits[number + 1].borrowed) & (held - set(visit.returned))
        held -= set(visit.returned)
    assert not held
    if once:
        assert len(came) == len(set(came))
