"""Who sends what to whom: channels, the order per pair of stages, and full programs."""

from __future__ import annotations

from pipepart.schedule import Message, make_schedule, messages_of


def channels(schedule, *edges):
    return messages_of(schedule, *edges).channels


def text(messages):
    return [str(message) for message in messages]


def test_channels_follow_the_senders_order():
    found = channels(make_schedule("1f1b", stages=2, microbatches=3))
    assert found == {
        (0, 1): tuple(Message("F", 0, 1, k) for k in range(3)),
        (1, 0): tuple(Message("B", 1, 0, k) for k in range(3)),
    }


def test_the_source_of_a_gradient_is_the_later_chunk():
    message = channels(make_schedule("gpipe", stages=2, microbatches=1))[1, 0][0]
    assert (message.source, message.target) == (1, 0)
    assert str(message.send) == "SEND B 1>0 .0"
    assert str(message.recv) == "RECV B 1>0 .0"


def test_skips_go_directly_and_edges_without_gradient_stay_silent():
    schedule = make_schedule("1f1b", stages=3, microbatches=1)
    found = channels(schedule, [(0, 1), (1, 2), (0, 2)], [(0, 1), (1, 2)])
    assert set(found) == {(0, 1), (1, 2), (0, 2), (2, 1), (1, 0)}
    assert text(found[0, 2]) == ["F 0>2 .0"]


def test_chunks_on_the_same_stage_exchange_no_message():
    found = channels(make_schedule("zb_v", stages=2, microbatches=1))  # placement 0 1 1 0
    assert text(found[0, 1]) == ["F 0>1 .0", "B 3>2 .0"]
    assert text(found[1, 0]) == ["F 2>3 .0", "B 1>0 .0"]
    assert channels(make_schedule("interleaved", stages=1, microbatches=2, chunks=3)) == {}


def test_the_nearest_receiver_is_served_first():
    schedule = make_schedule("interleaved", stages=2, microbatches=1, chunks=2)  # placement 0 1 0 1
    found = channels(schedule, [(0, 1), (0, 3), (1, 2), (2, 3)])
    assert text(found[0, 1]) == ["F 0>1 .0", "F 0>3 .0", "F 2>3 .0", "B 2>1 .0"]
    assert text(found[1, 0]) == ["F 1>2 .0", "B 3>2 .0", "B 3>0 .0", "B 1>0 .0"]


def test_both_directions_of_a_pair_have_one_order():
    (messages,) = messages_of(make_schedule("1f1b", stages=2, microbatches=3)).pair_order.values()
    assert sorted(text(messages)) == sorted(
        text(m for side in channels(make_schedule("1f1b", stages=2, microbatches=3)).values() for m in side)
    )
    # stage 0 lets two micro-batches in; the third forward follows the first backward
    assert messages.index(Message("B", 1, 0, 0)) < messages.index(Message("F", 0, 1, 2))


def test_a_forward_only_schedule_sends_no_gradients():
    found = channels(make_schedule("forward", stages=2, microbatches=2))
    assert found == {(0, 1): (Message("F", 0, 1, 0), Message("F", 0, 1, 1))}
    assert {
        a.kind for mine in messages_of(make_schedule("forward", stages=2, microbatches=2)).program for a in mine
    } == {
        "F",
        "SEND",
        "RECV",
    }


def test_a_program_keeps_the_compute_order_of_its_schedule():
    for name in ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v"):
        schedule = make_schedule(name, stages=4, microbatches=5)
        for mine, actions in zip(messages_of(schedule).program, schedule.actions):
            assert tuple(a for a in mine if a.kind in "FBIW") == actions
