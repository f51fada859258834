"""The search as a whole, on profiles made by hand."""

import re
from ast import literal_eval
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipework.planning.candidate import Candidate
from pipework.planning.layer_costs import DeviceKind, LayerSeconds, LinkSpeed, SkipBytes
from pipework.planning.plan import Plan
from pipework.planning.profiles import Profile
from pipework.planning.request import make_request
from pipework.planning.search import Budget, Search, best_plans, no_plan_fits, orders, plan_profile
from pipework.schedule import SCHEDULES, from_csv, validate
from pipework.schedule.analysis.memory import SLACK
from pipework.schedule.edges import offloaded, recomputed
from tests.planning.made_profiles import made

UNEVEN = [1.0, 3.0, 1.0, 2.0, 1.0, 1.0, 4.0, 1.0]


def planned(profile: Any = None, devices: Any = ("device", "device"), memory: Any = None, **options: Any) -> Plan:
    lines: list[str] = []
    profile = made(UNEVEN, transfer=0.01) if profile is None else profile
    options = {"iterations": 60, "chunks": [4, 8], **options}
    return plan_profile(profile, devices, memory, progress=lines.append, **options)


def named(request: Any, balance: list[int], schedule: str, chunks: int = 8) -> Candidate:
    workers = len(request.devices)
    placement = SCHEDULES[schedule].placement(workers, len(balance) // workers)
    return Candidate(request, tuple(range(workers)), placement, chunks, schedule, tuple(balance), (0,) * len(balance))


def test_a_plan_is_not_slower_than_cuts_made_by_hand() -> None:
    plan = planned()
    request = make_request(made(UNEVEN, transfer=0.01), ["device"] * 2, chunks=[4, 8])
    by_hand = [
        named(request, [split, 8 - split], schedule, chunks)
        for split in range(1, 8)
        for schedule in ("gpipe", "1f1b", "zb-h1")
        for chunks in (4, 8)
    ]
    assert plan.seconds <= min(each.seconds for each in by_hand)
    assert validate(plan.schedule).ascending
    assert plan.bound <= plan.seconds
    assert sum(plan.balance) == 8
    assert plan.seconds <= min(plan.named.values())


def test_limits_hold_and_cost_recomputation() -> None:
    profile, limit = made(UNEVEN, kept=[40] * 8), 3400
    free, tight = planned(profile, chunks=8), planned(profile, memory=limit, chunks=8)
    assert all(worker.total <= limit * SLACK for worker in tight.workers)
    assert tight.seconds >= free.seconds
    peaks = tight.simulation.peak_memory
    assert [worker.activations for worker in tight.workers] == list(peaks)


def test_recomputation_is_chosen_for_the_stage_that_needs_it() -> None:
    profile = made([1.0] * 8, kept=[100] * 8)
    plan = planned(profile, memory=2100, chunks=8, schedules=["1f1b"])
    # Four layers take 1600 bytes beside micro-batches of 400 bytes, and the first stage has two of those in flight.
    assert plan.balance == (4, 4)
    assert {stage for stage, _ in recomputed(plan.schedule)} == {0}


def over_a_link(bytes_per_second: float | None, layers: int = 8, kept: int = 100, transfer: float = 0.0) -> Profile:
    profile = made([1.0] * layers, kept=[kept] * layers, transfer=transfer)
    host = None if bytes_per_second is None else LinkSpeed(0.0, bytes_per_second)
    return replace(profile, kinds={name: replace(kind, host=host) for name, kind in profile.kinds.items()})


@pytest.mark.parametrize(
    ("profile", "options", "offloads"),
    [
        (over_a_link(1e9), {}, True),
        (over_a_link(1.0), {}, False),  # copies take longer than forwards do
        (over_a_link(None), {}, False),
        (over_a_link(1e9), {"offload": False}, False),
        (over_a_link(1e9), {"memory": 5000}, False),  # nothing lacks
    ],
)
def test_activations_go_to_the_host_where_memory_lacks_and_the_link_is_fast(
    profile: Profile, options: dict[str, Any], offloads: bool
) -> None:
    plan = planned(profile, ["device"] * 4, chunks=8, schedules=["1f1b"], **{"memory": 1520, **options})
    assert bool(offloaded(plan.schedule)) is offloads
    assert all(worker.fits for worker in plan.workers)
    free = planned(profile, ["device"] * 4, chunks=8, schedules=["1f1b"])
    if offloads:
        assert plan.seconds == free.seconds
        assert plan.workers[0].host > 0
        assert Plan.from_json(plan.to_json(), "plan.json") == plan
        assert not {"O", "L"} & from_csv(plan._to_csv()).kinds
        titles, first, *_ = str(plan).splitlines()[1:]
        assert "offloads" in titles
        assert titles.endswith("in host memory")
        assert "of 8" in first


def test_that_offloading_is_asked_for_without_a_link_is_noted() -> None:
    def noted(link: float | None, **options: Any) -> bool:
        return "offload=True changes nothing" in str(planned(over_a_link(link), ["device"] * 4, chunks=8, **options))

    assert [noted(None, offload=True), noted(None), noted(None, offload=False), noted(1e9, offload=True)] == [
        *(True, False, False, False)
    ]


@pytest.mark.parametrize("link", [None, 1e9])
def test_fewer_micro_batches_are_not_tried_where_more_have_not_fitted(link: float | None) -> None:
    profile = replace(over_a_link(link), batch=64)
    request = make_request(profile, ["device"] * 2, 2800, schedules=["1f1b"], chunks=[2, 4, 8, 16, 32])
    search = Search(request, Budget(iterations=200), print)
    found = search.run()
    assert found.fits
    assert {each.chunks for each in search.best()} == {8, 16, 32}


def test_host_memory_that_is_too_small_is_named() -> None:
    profile = over_a_link(1e9)
    request = replace(make_request(profile, ["device"] * 4, 1520, chunks=8, schedules=["1f1b"]), host_memory=10)
    small = best_plans(request, Budget(iterations=60), print)[0]
    assert sum(worker.host for worker in small.workers) <= 10  # inputs of what is recomputed
    none = best_plans(replace(request, host_memory=1), Budget(iterations=60), print)[0]
    assert not offloaded(none.schedule)
    assert small.seconds <= none.seconds
    plan = planned(profile, ["device"] * 4, chunks=8, schedules=["1f1b"], memory=1520)
    error = no_plan_fits(request, plan.devices, plan.workers)
    assert re.search("activations need .* of host memory, and 10 B are free", str(error))


@pytest.mark.parametrize(("transfer", "stages"), [(0.0, 6), (0.5, 4), (5.0, 3)])
def test_workers_get_more_stages_if_that_pays(transfer: float, stages: int) -> None:
    """One and two stages hold too much, and messages between many cost more than the bubble that they save."""
    profile = over_a_link(1e9, 24, 1000, transfer)
    options: dict[str, Any] = {"chunks": 8, "schedules": ["1f1b", "interleaved-1f1b"], "iterations": 40}
    plan = planned(profile, memory=14_000, **options)
    assert (plan.schedule.name, plan.schedule.stages) == ("interleaved-1f1b", 2 * stages)
    assert plan.balance == (12 // stages,) * 2 * stages
    assert offloaded(plan.schedule)
    assert not recomputed(plan.schedule)
    assert planned(profile, memory=14_000, **options) == plan


def test_a_small_device_comes_where_little_is_in_flight() -> None:
    profile = made([1.0] * 8, kept=[100] * 8, speeds={"large": 1.0, "small": 1.0})
    plan = planned(profile, ["small", "large"], {"small": 2100}, chunks=8, schedules=["1f1b"])
    assert plan.devices == ("large", "small")
    assert not recomputed(plan.schedule)


def test_skip_connections_are_waited_for(tmp_path: Path) -> None:
    """The popped tensor takes longer than the stages between."""
    slow = replace(made([1.0] * 4), links={("device", "device"): LinkSpeed(0.0, 10.0)})
    profile = replace(slow, skips=(SkipBytes(0, 3, (200, 200)),))
    settings: dict[str, Any] = {"devices": ["device"] * 4, "balance": [1] * 4, "chunks": 8, "schedule": "1f1b"}
    with_skip, without = (each.predict(**settings, checkpoint="never") for each in (profile, slow))
    assert with_skip.schedule.skips == ((0, 3),)
    # Forward and gradient of one micro-batch wait for it, 20 seconds each, and not for two stages and three messages.
    assert with_skip.seconds - without.seconds >= 2 * (20.0 - 2 - 3 * 0.2)
    assert with_skip.bound <= with_skip.seconds
    plan = planned(profile, ["device"] * 4, chunks=8, iterations=200)
    assert plan.seconds < with_skip.seconds  # another cut, or fewer devices
    for each in (with_skip, plan):
        each.save(tmp_path / "plan.json")
        each.save(tmp_path / "plan.csv")
        assert Plan.load(tmp_path / "plan.json").seconds == each.seconds
        assert from_csv((tmp_path / "plan.csv").read_text()).skips == ()


def test_a_slow_device_gets_less_or_nothing() -> None:
    profile = made([1.0] * 12, speeds={"fast": 1.0, "slow": 0.5})
    plan = planned(profile, ["slow", "fast", "fast"], iterations=120)
    busy = dict(zip(plan.devices, plan.simulation.busy, strict=True))
    work = {device: sum(plan.balance[stage] for stage, worker in enumerate(plan.schedule.placement)
                        if plan.devices[worker] == device) for device in busy}  # fmt: skip
    assert work["slow"] < work["fast"]
    useless = made([1.0] * 4, speeds={"fast": 1.0, "slow": 0.01})
    assert planned(useless, ["slow", "fast"]).devices == ("fast",)


def test_fewer_equal_devices_are_enough_if_messages_are_slow() -> None:
    slow = planned(made([1.0] * 8, transfer=1000.0), ["device"] * 4, chunks=[4], iterations=200)
    assert slow.devices == ("device",)
    quick = planned(made([1.0] * 8), ["device"] * 4, chunks=[4], iterations=200)
    assert len(quick.devices) == 4


def test_unequal_devices_are_ordered_by_their_speed_with_the_planned_micro_batches() -> None:
    """One kind is faster with one row only."""
    kinds = {
        "steady": DeviceKind(tuple(tuple(LayerSeconds(*[1.0] * 3) for _ in range(4)) for _ in range(2))),
        "swings": DeviceKind(tuple(tuple(LayerSeconds(*[each] * 3) for _ in range(4)) for each in (0.5, 4.0))),
    }
    profile = replace(made([1.0] * 4), kinds=kinds, links={})
    found = orders(make_request(profile, ["swings", "steady"], chunks=[1]))
    assert found == [(0, 1), (1, 0), (1,)]


def test_a_search_stops_at_the_bound() -> None:
    """Times that were measured are no round numbers, and sums of them differ in the last bit."""
    lines: list[str] = []
    profile = made([0.123456789e-3] * 2, batch=64, rows=(1, 64))
    plan = plan_profile(profile, ["device"], chunks=[7], iterations=10**6, progress=lines.append)
    assert plan.gap < 1e-9


@pytest.mark.thorough
def test_a_search_goes_on_until_something_fits() -> None:
    """The limit is near the smallest for which there is a plan, and the first candidates do not fit."""
    profile = made(UNEVEN, kept=[30] * 8)
    plan = planned(profile, memory=1900, chunks=[4], iterations=200)
    assert all(worker.fits for worker in plan.workers)
    assert planned(profile, memory=1900, iterations=200).seconds <= plan.seconds


# Limits that are too small


EQUAL = made(UNEVEN, kept=[40] * 8)
HEAVY = made(UNEVEN, kept=[100] * 8, weights=[100, 800, *[100] * 6])
TWO_KINDS = made(UNEVEN, kept=[40] * 8, speeds={"a": 1.0, "b": 0.5})
SHARED = replace(EQUAL, devices={"cpu": "device"})


def named_limits(text: str) -> Any:
    """What a message says would do."""
    found = re.search(r"it fits with memory=([^;]*);", text)
    assert found, text
    return literal_eval(found[1])


@pytest.mark.parametrize(
    ("profile", "devices", "memory", "text"),
    [
        (EQUAL, ["device"] * 2, 100, ""),  # far too small for any layer
        (EQUAL, ["device"] * 2, 1000, ""),  # too small for all weights
        (EQUAL, ["device"] * 2, 1620, ""),  # nearly enough
        (HEAVY, ["device"] * 2, 1000, ""),  # too small for one layer
        (
            *(HEAVY, ["device"] * 2, 3500),  # enough for it alone
            r"worker \d \(device\) needs 3.[67]\d KiB and may hold 3.42 KiB \(\d.\d+% too much\)",
        ),
        (TWO_KINDS, ["a", "b"], {"a": 2000, "b": 1300}, "memory={'a': .*, 'b': "),
        (TWO_KINDS, ["a", "b", "b"], 600, ""),
        (TWO_KINDS, ["b", "b"], {"b": 100}, "memory='"),  # both devices are alike: a number
        (SHARED, ["cpu", "cpu"], 2000, r"may hold .*, its part of cpu, which 2 workers share .*memory='3.\d+KiB'"),
        (SHARED, ["cpu", "cpu", "device"], {"cpu": 500, "device": 700}, ""),
    ],
)
def test_a_refused_limit_is_answered_with_one_that_does(
    profile: Profile, devices: list[str], memory: Any, text: str
) -> None:
    with pytest.raises(ValueError, match=f"no plan fits: .*{text}") as refused:
        planned(profile, devices, memory, iterations=20)
    limits = named_limits(str(refused.value))
    plan = planned(profile, devices, limits, iterations=20)
    assert all(each.fits for each in plan.workers)
