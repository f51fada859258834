import copy
import pickle
from dataclasses import replace

import pytest

from pipework.planning.profiles.layer_costs import LayerSeconds
from pipework.planning.profiles.profile import Profile
from tests.planning.made_profiles import made


def test_times_between_sizes_lie_on_a_line() -> None:
    profile = made([1.0, 2.0], rows=(2, 4, 16))
    for rows in (2, 3, 4, 10, 16, 20):
        assert profile.at(rows).seconds["device"][1] == pytest.approx(LayerSeconds(*[2.0 * rows] * 3))
        assert profile.at(rows).bytes[0].kept == 10 * rows


def test_below_the_smallest_size_a_time_does_not_fall_faster_than_the_rows() -> None:
    profile = made([1.0], rows=(4, 8))
    table = ((LayerSeconds(4, 4, 4),), (LayerSeconds(12, 12, 12),))  # the line meets 0 at 2 rows
    kind = replace(profile.kinds["device"], seconds=table)
    assert replace(profile, kinds={"device": kind}).at(1).seconds["device"][0].forward == 1


def test_one_size_is_taken_to_be_proportional() -> None:
    assert made([3.0], rows=(4,)).at(2).seconds["device"][0].forward == 6.0


def test_devices_are_known_by_name_and_by_kind() -> None:
    profile = made([1.0])
    assert profile.kind_of("device") == "device"
    with pytest.raises(ValueError, match=r"no times for device 'cuda:0': it knows 'device'; make a profile on that"):
        profile.kind_of("cuda:0")
    with pytest.raises(ValueError, match="at least 1"):
        profile.at(0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": (8, 1)}, r"rows is \[8, 1\]: wanted ascending"),
        ({"rows": ()}, "one of them is empty"),
        ({"rows": (1,)}, "are not 1 rows x 2 layers"),
        ({"devices": {"cuda:0": "unknown"}}, "devices of a kind that it does not know: 'cuda:0': 'unknown'"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes: dict[str, object], message: str) -> None:
    profile = made([1.0, 2.0])
    fields = {name: getattr(profile, name) for name in ("batch", "rows", "layers", "bytes", "kinds")}
    with pytest.raises(ValueError, match=message):
        Profile(**{**fields, **changes})


@pytest.mark.parametrize("number", [-1.0, float("nan"), float("inf")])
def test_numbers_are_finite_and_not_negative(number: float) -> None:
    with pytest.raises(ValueError, match="negative, infinite or NaN"):
        made([1.0, number])


def test_copies_and_pickles() -> None:
    profile = made([1.0])
    assert pickle.loads(pickle.dumps(profile)) == profile == copy.deepcopy(profile)
