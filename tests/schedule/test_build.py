import pytest

from pipework.schedule import SCHEDULES, build, fill_drain, interleaved_1f1b, looped_bfs, one_forward_one_backward


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["gpipe", "fill-drain", "GPipe", "ScheduleGPipe"], fill_drain(3, 5)),
        (["1f1b", "1F1B", "Schedule1F1B"], one_forward_one_backward(3, 5)),
        (["interleaved-1f1b", "Interleaved1F1B", "scheduleinterleaved1f1b"], interleaved_1f1b(3, 5, 2)),
        (["looped-bfs", "LoopedBFS", "ScheduleLoopedBFS"], looped_bfs(3, 5, 2)),
    ],
)
def test_names(names, expected):
    for name in names:
        assert build(name, workers=3, micro_batches=5) == expected


@pytest.mark.parametrize("name", ["gpip", "", None, ["gpipe"]])
def test_unknown_name_lists_the_known(name):
    with pytest.raises(ValueError, match="choose one of 'gpipe', 'fill-drain', '1f1b'"):
        build(name, workers=3, micro_batches=5)


def test_stages_per_worker():
    assert build("interleaved-1f1b", workers=3, micro_batches=5, stages_per_worker=4).stages == 12
    assert build("1f1b", workers=3, micro_batches=5, stages_per_worker=1).stages == 3
    with pytest.raises(ValueError, match=r"one stage per worker, got stages_per_worker=2: choose one of 'interleaved"):
        build("1f1b", workers=3, micro_batches=5, stages_per_worker=2)
    with pytest.raises(ValueError, match="stages_per_worker is 0"):
        build("looped-bfs", workers=3, micro_batches=5, stages_per_worker=0)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("workers", range(1, 7))
@pytest.mark.parametrize("micro_batches", range(1, 15))
def test_every_name_makes_valid_schedules_of_any_size(name, workers, micro_batches):
    for stages_per_worker in (1, 2, 3) if SCHEDULES[name].several else (1,):
        validation = build(
            name, workers=workers, micro_batches=micro_batches, stages_per_worker=stages_per_worker
        ).validate()
        assert validation.ok
        assert validation.ascending


def test_registry_is_immutable():
    with pytest.raises(TypeError):
        SCHEDULES["mine"] = fill_drain
