from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pipework.schedule import Action, Interval, Timeline
from pipework.timeline.trace import tracks

TRANSFERS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")


@given(st.lists(st.tuples(st.sampled_from(TRANSFERS), st.integers(0, 9), st.integers(0, 4)), max_size=20))
def test_intervals_of_a_track_are_disjoint(transfers):
    communication = tuple(
        Interval(0, Action(kind, 1, number, 2), start, start + length)
        for number, (kind, start, length) in enumerate(transfers)
    )
    found = tracks(Timeline((), workers=1, communication=communication))
    assert [track.number for track in found] == list(range(len(found)))
    assert len({track.name for track in found}) == len(found)
    for track in found:
        for before, after in pairwise(track.intervals):
            assert before.end <= after.start
    assert sorted(each for track in found for each in track.intervals) == sorted(communication)


def test_only_overlapping_intervals_take_further_tracks():
    sends = [Interval(0, Action("SEND_F", 0, m, 1), start, start + 2) for m, start in enumerate((0, 1, 2, 3))]
    _, first, second = tracks(Timeline((), workers=1, communication=tuple(sends)))
    assert (first.name, [each.start for each in first.intervals]) == ("send", [0, 2])
    assert (second.name, [each.start for each in second.intervals]) == ("send 2", [1, 3])
