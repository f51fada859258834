import math

import pytest

from pipework.schedule import KINDS, Costs, fill_drain, simulate
from pipework.schedule.placement import loop_placement, wave_placement


def test_defaults_are_unit_costs():
    costs = Costs().spread(stages=2)
    computing = {"F": (1, 1), "B": (2, 2), "R": (1, 1), "I": (1, 1), "W": (1, 1)}
    expected = {**computing, "REDUCE_GRAD": (0, 0), "UNSHARD": (0, 0)}
    assert {kind: costs[KINDS[kind].cost] for kind in expected} == expected
    names = ("transfer", "activation", "checkpoint_activation", "waiting", "weights")
    assert [costs[name] for name in names] == [(0,), (1, 1), (0, 0), (1, 1), (0, 0)]


@pytest.mark.parametrize(
    ("costs", "kinds"),
    [
        (Costs(3), {"F": 3, "R": 3, "B": 2, "I": 1, "W": 1}),
        (Costs(1, 4), {"F": 1, "R": 1, "B": 4, "I": 2, "W": 2}),
        (Costs(weight_gradient=3), {"F": 1, "R": 1, "B": 4, "I": 1, "W": 3}),
        (Costs(input_gradient=0, weight_gradient=7), {"F": 1, "R": 1, "B": 7, "I": 0, "W": 7}),
        (Costs(4, 5, recompute=6, input_gradient=1, weight_gradient=2), {"F": 4, "R": 6, "B": 5, "I": 1, "W": 2}),
    ],
)
def test_times_that_are_not_given_follow_from_others(costs, kinds):
    spread = costs.spread(1)
    assert {kind: spread[KINDS[kind].cost] for kind in kinds} == {kind: (time,) for kind, time in kinds.items()}


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (Costs(backward=[1, 2]), "backward has 2 numbers: wanted 3, one for each stage"),
        (Costs(transfer=[1, 2, 3]), "transfer has 3 numbers: wanted 2, one for each boundary"),
        (Costs(message=[1, 2, 3]), "message has 3 numbers: wanted 2, one for each boundary"),
        (Costs(skip_transfer=[1, 2]), "skip_transfer has 2 numbers: wanted 0, one for each skip"),
    ],
)
def test_wrong_length_is_named_before_any_work(costs, message):
    with pytest.raises(ValueError, match=message):
        simulate(fill_drain(3, 2), costs)


@pytest.mark.parametrize("value", [-1, math.nan, math.inf])
@pytest.mark.parametrize("field", list(Costs.__dataclass_fields__))
def test_impossible_numbers_are_named(field, value):
    with pytest.raises(ValueError, match=f"Costs: {field} is {value}: wanted a finite number of at least 0"):
        Costs(**{field: value})
    place = {"transfer": "boundary", "message": "boundary", "skip_transfer": "skip"}.get(field, "stage")
    with pytest.raises(ValueError, match=f"Costs: {field} of {place} 1 is {value}"):
        Costs(**{field: [1, value]})


@pytest.mark.parametrize("value", ["1", True, 1j, {1: 2}])
def test_other_types_are_named(value):
    with pytest.raises(TypeError, match="Costs: backward is"):
        Costs(backward=value)
    with pytest.raises(TypeError, match="Costs: forward is None"):
        Costs(forward=None)


def test_a_whole_share_divided_among_stages():
    share = Costs(1, 3, recompute=2, reduce_gradient=4, transfer=5, skip_transfer=6, activation=7, message=8)
    assert share.placed((0, 1, 1, 0)) == Costs(
        0.5, 1.5, 1, reduce_gradient=2, transfer=5, skip_transfer=6, activation=3.5, message=8
    )
    parts, whole = Costs().placed((0,) * 4).spread(1), Costs().spread(1)
    assert all(parts[row.cost] == (whole[row.cost][0] / 4,) for row in KINDS.values() if row.scope == "micro-batch")
    assert Costs(input_gradient=3).placed((0, 0)).spread(2)["backward"] == (2, 2)
    assert Costs([1, 2], weight_gradient=[1, 2]).placed((0, 0)).spread(2)["weight_gradient"] == (1, 2)
    uneven = Costs(4, transfer=5).placed((0, 1, 0)).spread(3)
    assert (uneven["forward"], uneven["weight_gradient"], uneven["transfer"]) == ((2, 4, 2), (0.5, 1, 0.5), (5, 5))


@pytest.mark.parametrize("sizes", [(1, 2), (2, 2), (3, 1), (3, 2), (2, 4)])
@pytest.mark.parametrize("placement", [loop_placement, wave_placement])
def test_numbers_for_each_worker_are_spread_over_its_stages(placement, sizes):
    workers, several = sizes
    if placement is wave_placement and several == 1:
        return
    homes = placement(*sizes)
    forward = [3.0 + worker for worker in range(workers)]
    transfer = [0.5 + worker for worker in range(workers - 1)]
    placed = Costs(forward, transfer=transfer, activation=6).placed(homes)
    spread = placed.spread(len(homes))
    for worker in range(workers):
        mine = [time for time, home in zip(spread["forward"], homes, strict=True) if home == worker]
        assert mine == [forward[worker] / several] * several
    assert spread["activation"] == (6 / several,) * len(homes)
    for boundary, time in enumerate(spread["transfer"]):
        ends = sorted(homes[boundary : boundary + 2])
        far = ends[1] - ends[0]
        assert time == (0 if not far else transfer[ends[0]] if far == 1 else max(transfer))


def test_numbers_for_each_stage_stay():
    assert Costs([1, 2, 3, 4], transfer=[1, 2, 3]).placed((0, 1, 1, 0)) == Costs(
        [1, 2, 3, 4], transfer=[1, 2, 3], input_gradient=0.5, weight_gradient=0.5, activation=0.5
    )
    assert Costs([1, 2]).placed((0, 1)).forward == (1, 2)
    assert Costs([1, 2, 3]).placed((0, 1, 1, 0)).forward == (1, 2, 3)  # for neither; spread() says so


def test_a_sequence_has_a_number():
    with pytest.raises(ValueError, match=r"Costs: forward has 0 numbers: wanted 1, one for each stage"):
        Costs(forward=[]).spread(1)
    assert Costs(forward=[1], transfer=[], message=[], skip_transfer=[]).spread(1)["transfer"] == ()


def test_saved_costs_are_loaded_as_they_were(tmp_path):
    for costs in (
        Costs(),
        Costs([0.1, 1 / 3], backward=2e-7, transfer=[0.5], message=[64], activation=[1e9, 2]),
        Costs(transfer=[], skip_transfer=[1]),
    ):
        costs.save(tmp_path / "costs.json")
        assert Costs.load(tmp_path / "costs.json") == costs


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"\xff\xfe\xff", ValueError, "costs.json is not JSON in UTF-8"),
        (b"forward=1", ValueError, "costs.json is not JSON in UTF-8: "),
        (b"[1]", ValueError, "costs.json: wanted an object with some of the names"),
        (b'{"forwards": 1}', ValueError, "costs.json: wanted an object with some of the names"),
        (b'{"forward": -1}', ValueError, "Costs: forward is -1"),
        (b'{"forward": "1"}', TypeError, "Costs: forward is '1'"),
    ],
)
def test_files_that_are_no_costs(tmp_path, content, error, message):
    (tmp_path / "costs.json").write_bytes(content)
    with pytest.raises(error, match=message):
        Costs.load(tmp_path / "costs.json")
