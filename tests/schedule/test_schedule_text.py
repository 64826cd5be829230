"""Pictures and tables: the pictures in the docstrings are those of the simulator."""

from __future__ import annotations

import pytest

from pipepart.errors import ScheduleError
from pipepart.schedule import ChunkCosts, Edges, compare, format_table, gantt, make_schedule, picture, simulate, table
from pipepart.schedule.controlled_memory import dualpipe_v, v_half, v_min
from pipepart.schedule.generators import forward_only, gpipe, interleaved, one_f_one_b, zb_h1, zb_h2, zb_v
from pipepart.schedule.searched import zb_1p, zb_2p


@pytest.mark.parametrize(
    ("generator", "name", "p", "m", "v"),
    [
        (gpipe, "gpipe", 4, 4, 1),
        (one_f_one_b, "1f1b", 4, 6, 1),
        (interleaved, "interleaved", 2, 4, 2),
        (forward_only, "forward", 4, 4, 1),
        (zb_h1, "zb_h1", 4, 6, 1),
        (zb_h2, "zb_h2", 3, 6, 1),
        (zb_v, "zb_v", 3, 5, 2),
        (v_half, "v_half", 3, 5, 2),
        (v_min, "v_min", 3, 5, 2),
        (dualpipe_v, "dualpipe_v", 3, 7, 2),
        (zb_1p, "zb_1p", 3, 6, 1),
        (zb_2p, "zb_2p", 3, 6, 1),
    ],
)
def test_the_picture_in_the_docstring_is_what_happens(generator, name, p, m, v):
    schedule = make_schedule(name, stages=p, microbatches=m, chunks=v)
    picture = gantt(simulate(schedule, ChunkCosts.even(p, v)), unit=1 / v)
    drawn = "\n".join(line.strip() for line in generator.__doc__.splitlines())
    assert picture in drawn


def test_gantt_shows_uneven_times_reductions_and_colors():
    costs = ChunkCosts((1.0, 3.0), (1.0, 1.0), (0.0, 0.0), reduce=(2.0, 0.0), send_forward={(0, 1): 1.0})
    timeline = simulate(make_schedule("gpipe", stages=2, microbatches=1), costs, Edges.chain(2))
    assert gantt(timeline, unit=1.0) == "stage  0  0.....A~~\nstage  1  ..000A..."
    assert gantt(timeline, width=18) == "stage  0  00..........AA~~~~\nstage  1  ....000000AA......"
    assert "\x1b[34m0\x1b[0m" in gantt(timeline, unit=1.0, color=True)


def test_the_table_compares_all_schedules_with_the_bound():
    rows = compare(4, 8)
    assert [(row.schedule, row.chunks) for row in rows] == [
        ("gpipe", 1), ("1f1b", 1), ("zb_h1", 1), ("zb_h2", 1), ("zb_1p", 1), ("zb_2p", 1),
        ("gpipe", 2), ("interleaved", 2), ("zb_v", 2), ("v_half", 2), ("v_min", 2), ("dualpipe_v", 2),
        ("gpipe", 4), ("interleaved", 4),
    ]  # fmt: skip
    by_name = {(row.schedule, row.chunks): row for row in rows}
    assert by_name["1f1b", 1].bubble == pytest.approx(0.2727, abs=5e-5)
    assert by_name["zb_h2", 1].steady_bubble == pytest.approx(0.0)
    assert by_name["interleaved", 2].peak == 5.5
    assert all(row.step_time >= row.bound * (1 - 1e-9) for row in rows)
    lines = format_table(rows).splitlines()
    assert len(lines) == 15
    assert len({len(line) for line in lines}) == 1
    assert lines[2].split() == ["1f1b", "4", "8", "1", "1:1:1", "33", "0.2727", "0.2727", "4", "33", "0.0%"]


def test_the_whole_table_has_a_block_per_case():
    text = table([2], [3, 4], [1], [(1.0, 1.0, 1.0), (1.0, 2.0, 1.0)], send=0.1)
    assert text.count("schedule ") == 4
    assert "1:2:1" in text


def test_the_picture_of_a_schedule_by_name_or_from_a_file(tmp_path):
    lines = picture("zb_h1", stages=2, microbatches=2).splitlines()
    assert lines[0] == "zb_h1: 2 stages, 2 micro-batches"
    assert lines[1] == "step 7, bubble 0.1429, peak activations 2, 2"
    assert lines[2:4] == ["stage  0  01.AaBb", "stage  1  .0A1Bab"]
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0B0\n1F0,1B0\n")
    assert "stage  1  .0AA.." in picture(str(path))
    with pytest.raises(ScheduleError, match="is for 2 stages; expected 3"):
        picture(str(path), stages=3)
    assert "chunk" in picture("interleaved", stages=2, microbatches=2, send=0.5, ratio=(1.0, 2.0, 1.0))
