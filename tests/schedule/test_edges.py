from pipework.schedule import fill_drain, forward_only, looped_bfs, with_skips, zb_v
from pipework.schedule.edges import crossings, routes


def test_routes_include_skips_in_both_directions_and_inference_has_forward_routes_only():
    schedule = with_skips(fill_drain(3, 1), [(0, 2)])
    assert [(route.kind, route.source, route.target) for route in routes(schedule)] == [
        ("F", 0, 1), ("F", 1, 2), ("F", 0, 2), ("B", 1, 0), ("B", 2, 1), ("B", 2, 0),
    ]  # fmt: skip
    assert {route.kind for route in routes(forward_only(3, 1))} == {"F"}


def test_stages_of_one_worker_have_no_crossing():
    assert not list(crossings(looped_bfs(1, 1, 3)))
    assert [(route.source, route.target) for route in crossings(zb_v(2, 1))] == [(0, 1), (2, 3), (1, 0), (3, 2)]
