from itertools import product

import pytest

from pipework.planning.certificate import any_plan_bound
from pipework.planning.request import make_request
from tests.planning.made_profiles import made
from tests.planning.test_search import named, planned


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
def test_no_cut_and_schedule_undercuts_the_bound(schedule: str) -> None:
    profile = made([1.0, 3.0, 1.0, 2.0, 4.0, 1.0], speeds={"a": 1.0, "b": 0.7})
    for devices in (["a", "a"], ["a", "b"], ["b", "a", "a"]):
        request = make_request(profile, devices, chunks=[2, 8])
        for balance in product(range(1, 5), repeat=len(devices)):
            if sum(balance) == 6:
                for chunks in (2, 8):
                    found = named(request, list(balance), schedule, chunks)
                    assert any_plan_bound(request) <= found.seconds * (1 + 1e-9)


def test_one_long_layer_binds() -> None:
    plan = planned(made([1.0, 20.0, 1.0]), iterations=80)
    assert plan.certificate.binding.startswith(("layer 1, alone on worker", "the work of worker"))
    assert plan.certificate.any_bound == pytest.approx(8 * 60.0)


def test_slow_links_bind() -> None:
    plan = planned(made([1.0] * 4, transfer=8.0), chunks=4, schedules=["1f1b"])
    assert "transfers, which delay the step by" in plan.certificate.binding


def test_memory_binds() -> None:
    plan = planned(made([1.0] * 8, kept=[100] * 8), memory=2100, chunks=8, schedules=["1f1b"])
    assert plan.certificate.binding.startswith("the memory of worker")


def test_smaller_micro_batches_count_as_such() -> None:
    """Seven rows in four micro-batches are seven rows of work, and not eight."""
    profile = made([1.0, 1.0], batch=7, rows=(1, 2))
    assert any_plan_bound(make_request(profile, ["device"] * 2, chunks=4)) == pytest.approx(7 * 6 / 2)
    assert "4 micro-batches of up to 2 rows" in str(planned(profile, chunks=4))
    assert "7 micro-batches of 1 row," in str(planned(profile, chunks=7))


def test_settings_are_bounded_with_their_own_micro_batches() -> None:
    profile = made([1.0, 1.0], batch=64, rows=(1, 64), joined=(0.5, 0.5, 0.5))
    found = profile.predict(["device"] * 2, balance=[1, 1], chunks=2, schedule="1f1b", checkpoint="never")
    assert found.certificate.any_bound == any_plan_bound(make_request(profile, ["device"] * 2, chunks=2))
    assert found.certificate.any_bound <= found.seconds


def test_memory_without_a_limit_does_not_bind() -> None:
    found = made([1.0] * 4).predict(["device"] * 2, balance=[2, 2], chunks=8, schedule="1f1b", checkpoint="always")
    assert "memory" not in found.certificate.binding
