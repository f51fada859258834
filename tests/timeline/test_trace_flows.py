from pipework.schedule import Action, Interval, Timeline
from pipework.timeline.trace import flows, tracks


def at(worker, text, start, end, step=0):
    return Interval(worker, Action.parse(text), start, end, step=step)


def found(computation, communication=(), workers=3):
    line = Timeline(tuple(computation), workers, communication=tuple(communication))
    rows = tracks(line)
    names = {(row.worker, row.number): row.name for row in rows}
    return [(name, [(names[stop[:2]], *stop) for stop in stops]) for name, stops in flows(line, rows)]


def test_a_skip_connection_has_a_flow_of_its_own():
    computation = [at(stage, f"{stage}F0", 2 * stage, 2 * stage + 1) for stage in range(3)]
    communication = [
        at(0, "0SEND_F0@2", 1, 3),
        at(2, "2RECV_F0@0", 1, 3),
        at(0, "0SEND_F0", 1, 2),
        at(1, "1RECV_F0", 1, 2),
        at(1, "1SEND_F0", 3, 4),
        at(2, "2RECV_F0", 3, 4),
    ]
    ways = [[stop[1] for stop in stops] for _, stops in found(computation, communication)]
    assert ways == [[0, 0, 1, 1], [1, 1, 2, 2], [0, 0, 2, 2]]
    assert found(computation, communication)[2] == (
        "value",
        [("compute", 0, 0, 0.5), ("send 2", 0, 2, 2), ("receive", 2, 1, 2.5), ("compute", 2, 0, 4.5)],
    )


def test_within_a_worker_no_channel_is_needed():
    computation = [at(0, "0F0", 0, 1), at(0, "1F0", 1, 2)]
    communication = [at(0, "0REDUCE_GRAD", 2, 3)]
    assert found(computation, communication) == [("value", [("compute", 0, 0, 0.5), ("compute", 0, 0, 1.5)])]


def test_a_flow_passes_by_what_takes_no_time():
    computation = [at(0, "0F0", 0, 1), at(1, "1F0", 1, 2)]
    communication = [at(0, "0SEND_F0", 1, 1), at(1, "1RECV_F0", 1, 1)]
    ((_, stops),) = found(computation, communication)
    assert [stop[0] for stop in stops] == ["compute", "compute"]


def test_half_of_what_is_known_is_shown():
    computation = [at(0, "0F0", 0, 1), at(1, "1F1", 1, 2)]
    communication = [at(0, "0SEND_F0", 1, 2), at(1, "1RECV_F1", 0, 1), at(2, "2RECV_F2", 0, 1)]
    assert [[stop[0] for stop in stops] for _, stops in found(computation, communication)] == [
        ["compute", "send"],
        ["receive", "compute"],
    ]


def test_steps_are_kept_apart():
    computation = [at(s, f"{s}F0", t + 2 * s, t + 2 * s + 1, step) for step, t in ((0, 0), (1, 10)) for s in (0, 1)]
    communication = [at(s, text, 11, 12, 1) for s, text in ((0, "0SEND_F0"), (1, "1RECV_F0"))]
    lengths = [len(stops) for _, stops in found(computation, communication)]
    assert lengths == [2, 4]
