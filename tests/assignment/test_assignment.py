"""Which stages, workers and devices a schedule gets."""

import logging
from typing import Any

import pytest
import torch
from torch import nn

from pipework import Pipe, PipeWarning, WithDevice
from pipework.assignment.assignment import assign
from pipework.assignment.partition import Machine
from pipework.schedule import (
    Action,
    Schedule,
    ScheduleSpec,
    fill_drain,
    forward_only,
    hanayo,
    interleaved_1f1b,
    one_forward_one_backward,
)

CPU = torch.device("cpu")


def layers(count: int = 8) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))


def plan(schedule: Any, count: int = 8, chunks: int = 4, **options: Any) -> Any:
    return assign(layers(count), schedule, chunks, options.get("balance"), options.get("devices"))


@pytest.mark.parametrize(
    ("schedule", "options", "balance", "placement"),
    [
        ("1f1b", {"devices": ["cpu"] * 4}, (2, 2, 2, 2), (0, 1, 2, 3)),
        ("Schedule1F1B", {"balance": [3, 5], "devices": ["cpu"] * 3}, (3, 5), (0, 1)),
        ("interleaved-1f1b", {"balance": [2, 2, 2, 2]}, (2, 2, 2, 2), (0, 1, 0, 1)),
        ("interleaved-1f1b", {"balance": [1, 1, 2, 2, 1, 1], "devices": ["cpu"] * 2}, (1, 1, 2, 2, 1, 1), (0, 1) * 3),
        ("interleaved-1f1b", {"balance": [2, 2, 2, 2], "devices": ["cpu"] * 4}, (2, 2, 2, 2), (0, 1, 2, 3)),
        ("INTERLEAVED1F1B", {"devices": ["cpu"] * 2}, (2, 2, 2, 2), (0, 1, 0, 1)),
        ("hanayo", {"devices": ["cpu"] * 2}, (2, 2, 2, 2), (0, 1, 1, 0)),
        ("hanayo", {"balance": [1] * 8, "devices": ["cpu"] * 2}, (1,) * 8, (0, 1, 1, 0, 0, 1, 1, 0)),
        *((name, {"devices": ["cpu"] * 2}, (2, 2, 2, 2), (0, 1, 1, 0)) for name in ("zb-v", "dualpipe-v")),
        ("ScheduleZBVZeroBubble", {"balance": [2, 2, 2, 2]}, (2, 2, 2, 2), (0, 1, 1, 0)),
        ("looped-bfs", {"balance": [8], "devices": ["cpu"]}, (8,), (0,)),
        ("schedulelooped_bfs", {"balance": [4, 4], "devices": ["cpu"]}, (4, 4), (0, 0)),
        (one_forward_one_backward(2, 4), {"balance": [3, 5]}, (3, 5), (0, 1)),
        (interleaved_1f1b(2, 4, 2), {"devices": ["cpu"] * 2}, (2, 2, 2, 2), (0, 1, 0, 1)),
        (interleaved_1f1b(2, 4, 2), {}, (2, 2, 2, 2), (0, 1, 0, 1)),
        (interleaved_1f1b(2, 4, 2), {"devices": ["cpu"] * 5}, (2, 2, 2, 2), (0, 1, 0, 1)),
    ],
)
def test_stages_go_round_the_workers(
    schedule: Any, options: dict[str, Any], balance: tuple[int, ...], placement: tuple[int, ...]
) -> None:
    found = plan(schedule, **options)
    assert found.partitioning.balance == balance
    assert found.placement == placement
    assert found.workers == max(placement) + 1
    assert found.devices == (CPU,) * found.workers
    made = found.schedule(4)
    assert made.placement == placement
    assert made.micro_batches == 4


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b"])
def test_without_balance_and_devices_it_chooses_and_says_so(schedule: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="pipework"):
        found = plan(schedule)
        plan(schedule, balance=[4, 4])
        plan(schedule, devices=["cpu"])
    assert sum(found.partitioning.balance) == 8
    (record,) = caplog.records
    balance, devices = list(found.partitioning.balance), ["cpu"] * len(found.placement)
    assert record.getMessage().startswith(f"balance {balance} on {devices}: ")
    assert "\n" not in record.getMessage()


def test_few_layers_make_few_stages_if_it_may_choose() -> None:
    with pytest.raises(ValueError, match="2 stages, and there are 1 layers: each needs one"):
        assign(layers(1), "looped-bfs", 4, None, None)  # a worker holds two stages unless told otherwise
    assert assign(layers(1), "looped-bfs", 4, [1], ["cpu"]).placement == (0,)
    assert assign(layers(3), "looped-bfs", 4, None, None).placement == (0, 0)


@pytest.mark.parametrize("balance", [None, []])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", fill_drain(2, 4)])
def test_a_module_without_layers_has_no_stages(schedule: Any, balance: list[int] | None) -> None:
    assert assign(nn.Sequential(), schedule, 4, balance, None).placement == ()
    x = torch.ones(2)
    assert Pipe(nn.Sequential(), 4, schedule=schedule, balance=balance)(x) is x


@pytest.mark.parametrize(
    ("schedule", "options", "error", "message"),
    [
        (5, {}, TypeError, "schedule is 5: wanted a name such as '1f1b', a ScheduleSpec or a Schedule"),
        ("zb-v", {"balance": [8]}, ValueError, "stages_per_worker is 1: .*an even number"),
        ("forward-only", {}, ValueError, "'forward-only' has no backwards: give one that trains"),
        ("2f2b", {}, ValueError, "no schedule is called '2f2b': choose one of 'gpipe'.*give the ScheduleSpec"),
        (ScheduleSpec(fill_drain), {"balance": [4, 4], "devices": ["cpu"]}, IndexError, "too few devices"),
        (ScheduleSpec(lambda p, m: m), {}, TypeError, "made 4: wanted a Schedule"),
        (ScheduleSpec(forward_only), {}, ValueError, "'forward-only' has no backwards: give one that trains"),
        (ScheduleSpec(lambda p, m: fill_drain(p, m + 1)), {}, ValueError, "was asked for 4 micro-batches"),
        (
            ScheduleSpec(hanayo, 2, any_stages_per_worker=True, timed=True),
            {"devices": ["cpu"] * 2},
            ValueError,
            r"on workers \(0, 1, 0, 1\), and made .* with \(0, 1, 1, 0\): correct its generator, or its placement",
        ),
        ("interleaved-1f1b", {"balance": [3, 3, 2], "devices": ["cpu"] * 2}, ValueError, "3 partitions for 2 workers"),
        ("looped-bfs", {"balance": [3, 3, 2]}, ValueError, "3 partitions for 2 workers"),
        (
            "interleaved-1f1b",
            {"devices": ["cpu"] * 5},
            ValueError,
            "10 stages, and there are 8 layers: each needs one; use fewer workers",
        ),
        (interleaved_1f1b(2, 4, 2), {"devices": ["cpu"]}, IndexError, r"devices: 1, workers: 2"),
        (interleaved_1f1b(2, 4, 2), {"balance": [4, 4]}, ValueError, "has 4 stages, and balance has 2"),
        (one_forward_one_backward(9, 4), {}, ValueError, "has 9 stages, and there are 8 layers"),
        (one_forward_one_backward(2, 5), {}, ValueError, "chunks is 4, but the schedule '1f1b' is for 5 micro-batches"),
    ],
)
def test_what_does_not_fit_is_refused(schedule: Any, options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        plan(schedule, **options)


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("1f1b", ScheduleSpec(one_forward_one_backward)),
        ("interleaved-1f1b", ScheduleSpec(interleaved_1f1b, 2, any_stages_per_worker=True)),
    ],
)
def test_a_spec_of_ones_own_is_planned_like_its_name(name: str, spec: ScheduleSpec) -> None:
    for options in ({"devices": ["cpu"] * 2}, {"balance": [2, 2, 2, 2]}):
        mine, known = plan(spec, **options), plan(name, **options)
        assert (mine.partitioning, mine.placement) == (known.partitioning, known.placement)
        assert mine.schedule(3) == known.schedule(3)


def test_a_schedule_that_cannot_run_is_refused_and_one_for_fewer_rows_is_a_part_of_it() -> None:
    stuck = Schedule("stuck", (0,), ((Action("B", 0, 0), Action("F", 0, 0)),))
    with pytest.raises(ValueError, match="stuck"):
        plan(stuck, chunks=1)
    own = one_forward_one_backward(2, 4)
    found = plan(own)
    assert found.schedule(4) is own
    assert found.schedule(3) == one_forward_one_backward(2, 3)
    assert plan("interleaved-1f1b", devices=["cpu"] * 2).schedule(3) == interleaved_1f1b(2, 3, 2)


# Layers that lie somewhere already


def test_placed_layers_are_stages_if_each_worker_holds_one() -> None:
    module = nn.Sequential(*(WithDevice(nn.Linear(2, 2), "cpu") for _ in range(4)))
    assert assign(module, "1f1b", 4, None, None).placement == (0, 1, 2, 3)
    with pytest.raises(ValueError, match="wrapped in WithDevice, and with schedule 'interleaved-1f1b' each worker"):
        assign(module, "interleaved-1f1b", 4, None, None)


def test_accelerators_are_taken_first(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine((torch.device("cuda", 0), torch.device("cuda", 1)), 0, 8)
    monkeypatch.setattr(Machine, "here", staticmethod(lambda: machine))
    for options in ({}, {"balance": [2, 2, 2, 2]}, {"devices": [0, 1]}, {"balance": [4, 4], "devices": [1, 0]}):
        found = plan("looped-bfs", **options)
        assert {device.type for device in found.devices} == {"cuda"}
        assert len(found.placement) == len(found.partitioning.balance)
    assert [device.index for device in found.devices] == [1, 0]


def test_several_workers_and_one_micro_batch() -> None:
    with pytest.warns(PipeWarning, match="^chunks is 1, so 2 workers wait for each other.*give Pipe chunks=8") as seen:
        Pipe(layers(2), devices=["cpu", "cpu"])
    assert [each.filename for each in seen] == [__file__]
    for options in ({"chunks": 2, "devices": ["cpu"] * 3}, {"devices": ["cpu"]}, {"schedule": fill_drain(1, 1)}):
        Pipe(layers(2), **options)  # warnings are errors
