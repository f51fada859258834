import pytest

from pipework.schedule.placement import loop_placement, wave_placement


def test_loop():
    assert loop_placement(3, 2) == (0, 1, 2, 0, 1, 2)


def test_wave():
    assert wave_placement(4, 2) == (0, 1, 2, 3, 3, 2, 1, 0)
    assert wave_placement(2, 4) == (0, 1, 1, 0, 0, 1, 1, 0)
    assert wave_placement(1, 2) == (0, 0)


@pytest.mark.parametrize("stages_per_worker", [1, 3])
def test_waves_come_back(stages_per_worker):
    with pytest.raises(ValueError, match=f"stages_per_worker is {stages_per_worker}: .* choose 2, 4, "):
        wave_placement(2, stages_per_worker)
