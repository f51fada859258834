import copy
import pickle
from dataclasses import replace

import pytest

from pipework.planning.profiles.layer_costs import DeviceKind, LayerSeconds, LinkSpeed
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


def test_whether_the_input_is_saved_is_no_number_to_interpolate() -> None:
    profile = made([1.0], rows=(2, 4, 8))
    table = tuple((row[0]._replace(saves_input=saves),) for row, saves in zip(profile.bytes, (0, 1, 1), strict=True))
    saved = replace(profile, bytes=table)
    assert [saved.at(rows).bytes[0].saves_input for rows in (1, 2, 3, 4, 6, 16)] == [0, 0, 1, 1, 1, 1]
    single = replace(made([1.0], rows=(4,)), rows=(4,))
    assert {single.at(rows).bytes[0].saves_input for rows in (1, 2, 4, 64)} == {1}


def test_larger_micro_batches_take_no_less_than_the_largest_that_was_measured() -> None:
    """The larger size was measured in a quiet moment: the line falls."""
    kind = DeviceKind(((LayerSeconds(2.0, 2.0, 2.0),), (LayerSeconds(1.0, 1.0, 1.0),)))
    profile = replace(made([1.0], rows=(4, 8)), kinds={"device": kind}, links={})
    assert profile.at(100).seconds["device"][0] == (1.0, 1.0, 1.0)


def test_links_have_a_finite_speed() -> None:
    with pytest.raises(ValueError, match="wanted a finite bytes_per_second above 0"):
        replace(made([1.0]), links={("device", "device"): LinkSpeed(0.0, float("inf"))})
