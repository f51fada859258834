import pytest

from pipework.schedule import SCHEDULES, build, fill_drain


@pytest.mark.parametrize("name", ["gpipe", "fill-drain"])
def test_names_of_fill_drain(name):
    assert build(name, workers=3, micro_batches=5) == fill_drain(3, 5)


@pytest.mark.parametrize("name", ["GPipe", "", None, ["gpipe"]])
def test_unknown_name_lists_the_known(name):
    with pytest.raises(ValueError, match="choose one of 'gpipe', 'fill-drain'"):
        build(name, workers=3, micro_batches=5)


def test_every_name_makes_a_valid_schedule():
    for name in SCHEDULES:
        assert build(name, workers=4, micro_batches=8).validate().ok, name


def test_registry_is_immutable():
    with pytest.raises(TypeError):
        SCHEDULES["mine"] = fill_drain
