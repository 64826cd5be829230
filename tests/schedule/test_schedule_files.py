"""Schedules in CSV files: written, read, written by hand, and refused with the place of the mistake."""

from __future__ import annotations

import pytest

from pipepart.errors import ScheduleError
from pipepart.schedule import (
    SCHEDULES,
    Action,
    from_csv,
    make_schedule,
    messages_of,
    read_csv,
    read_program,
    to_csv,
    write_csv,
    write_program,
)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 3), (4, 6)])
def test_a_schedule_comes_back_as_it_was(name, p, m, tmp_path):
    schedule = make_schedule(name, stages=p, microbatches=m)
    path = tmp_path / "kept.csv"
    write_csv(schedule, path)
    back = read_csv(path)
    assert (back.actions, back.placement, back.microbatches) == (schedule.actions, schedule.placement, m)
    assert back.name == "kept"
    write_program(messages_of(schedule).program, path)
    assert read_program(path) == messages_of(schedule).program
    assert read_csv(path).actions == schedule.actions


def test_the_format_is_that_of_torch():
    assert to_csv(make_schedule("1f1b", stages=2, microbatches=2)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_a_schedule_written_by_hand_can_be_used(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("0F0, 0F1, , 0I0, 0W0, 0B1\n,1F0,1B0,1F1,1B1,1REDUCE_GRAD\n")
    schedule = make_schedule(str(path), stages=2, microbatches=2)
    assert schedule.name == "mine"
    assert schedule.actions[0][2] == Action("I", 0, 0)
    assert set(messages_of(schedule).channels) == {(0, 1), (1, 0)}
    for asked, message in (
        ({"stages": 3, "microbatches": 2}, "is for 2 stages; expected 3"),
        ({"stages": 2, "microbatches": 4}, "is for 2 micro-batches; expected 4"),
        ({"stages": 2, "microbatches": 2, "chunks": 2}, "has 2 chunks; expected 2 on each of 2 stages"),
    ):
        with pytest.raises(ScheduleError, match=message):
            make_schedule(str(path), **asked)


def test_overlapped_actions_are_read_one_after_the_other():
    schedule = from_csv("0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n")
    assert [str(a) for a in schedule.actions[1]] == ["F1.0", "F1.1", "B1.0", "B1.1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0\n", "row 1, cell 2: '0X0' is not an action; expected chunk, kind and micro-batch such as 2F0"),
        ("0F0\n1F\n", "row 2, cell 1: '1F' is not an action"),
        ("\n", "is empty"),
        ("0F0\n2F0\n", "chunk 1 has no action"),
        ("0F0,1F0\n1F0\n", "F1.0 is on stage 1, but chunk 1 is on stage 0"),
        ("0F0,0B0\n1B0,1F0\n", r"stage 1 does B1\.0 \(action 0\) before F1\.0"),
    ],
)
def test_mistakes_in_a_file_are_named(text, message):
    with pytest.raises(ScheduleError, match=message):
        from_csv(text)


def test_a_file_that_cannot_be_read_is_an_error_of_ours(tmp_path):
    with pytest.raises(ScheduleError, match="cannot read"):
        read_csv(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScheduleError, match="cannot read"):
        read_csv(tmp_path / "binary.csv")


def test_messages_over_a_skip_cannot_be_written(tmp_path):
    lists = messages_of(make_schedule("1f1b", stages=3, microbatches=1), [(0, 1), (1, 2), (0, 2)]).program
    with pytest.raises(ScheduleError, match=r"SEND F 0>2 \.0 passes over a chunk"):
        write_program(lists, tmp_path / "skip.csv")
