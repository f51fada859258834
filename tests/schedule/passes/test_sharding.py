"""Where weights are gathered and freed: rules, times and memory."""

import pytest

from pipework.schedule import (
    Costs,
    interleaved_1f1b,
    looped_bfs,
    simulate,
    validate,
    with_communication,
    with_gradient_reduction,
    with_sharding,
    zb_v,
)
from pipework.schedule.schedule import Schedule


def kinds(schedule: Schedule, worker: int = 0) -> list[str]:
    return [str(action) for action in schedule.orders[worker] if action.kind in ("UNSHARD", "RESHARD")]


def test_each_stage_is_gathered_once_for_a_stretch_of_work() -> None:
    schedule = looped_bfs(1, 3, 2)
    assert kinds(with_sharding(schedule, 1)) == [
        "0UNSHARD", "0RESHARD", "1UNSHARD", "1RESHARD", "0UNSHARD", "0RESHARD",
    ]  # fmt: skip
    assert kinds(with_sharding(schedule, 2)) == ["0UNSHARD", "1UNSHARD", "1RESHARD", "0RESHARD"]


@pytest.mark.parametrize("whole_stages", [1, 2, 3])
@pytest.mark.parametrize("make", [looped_bfs, interleaved_1f1b, zb_v])
def test_no_more_stages_are_whole_than_wanted(make: object, whole_stages: int) -> None:
    schedule = zb_v(3, 6) if make is zb_v else make(3, 6, 3)  # type: ignore[operator]
    sharded = with_sharding(with_communication(with_gradient_reduction(schedule)), whole_stages)
    validate(sharded).raise_if_invalid()
    for order in sharded.orders:
        whole: set[int] = set()
        for action in order:
            if action.kind == "UNSHARD":
                whole.add(action.stage)
                assert len(whole) <= whole_stages
            elif action.kind == "RESHARD":
                whole.remove(action.stage)
        assert not whole


def test_gathering_takes_time_and_memory() -> None:
    plain, costs = looped_bfs(1, 2, 2), Costs(unshard=0.5, weights=10.0)
    sharded = with_sharding(plain, 1)
    without, result = simulate(plain, costs), simulate(sharded, costs)
    assert result.makespan == without.makespan + 3 * 0.5
    assert result.peak_memory[0] == without.peak_memory[0] + 10.0
    assert simulate(with_sharding(plain, 2), costs).peak_memory[0] == without.peak_memory[0] + 20.0
    gathered = [each for each in result.timeline.communication if each.action.kind == "UNSHARD"]
    assert [each.end - each.start for each in gathered] == [0.5] * 3
