"""Peaks of devices worked out by hand; test_predict.py compares them with what devices count."""

from dataclasses import replace

import pytest
import torch

from pipework.planning.measuring.device_peaks import device_peaks
from pipework.planning.measuring.stage_copy import ActionBytes, Need
from pipework.schedule import build, simulate, with_offload, with_recompute

A, B = torch.device("cuda", 0), torch.device("cuda", 1)
# Each action makes what it leaves at once: a graph of 10, an output of 3, gradients of 5 for the parameters.
STAGE = ActionBytes(
    given=3,
    forward=Need(13, 13),
    kept=10,
    kept_with_output=13,
    backward=(Need(8, 8), Need(4, 4)),
    returned=3,
    waiting=6,
    weight=(Need(5, 5), Need(5, 5)),
    gradients=5,
    clones=1,
)


def peaks(name: str, chunks: int, devices: list[torch.device], recomputed: int = 0) -> dict[torch.device, int]:
    schedule = with_recompute(build(name, workers=len(devices), chunks=chunks), recomputed)
    return device_peaks(simulate(schedule).timeline, [STAGE] * len(devices), devices)


def test_one_stage_holds_all_graphs_of_gpipe() -> None:
    assert peaks("gpipe", 4, [A]) == {A: 4 * 10 + 8}  # at the first backward
    assert peaks("gpipe", 1, [A]) == {A: 10 + 8}


def test_a_message_lies_on_the_device_of_the_receiver() -> None:
    found = peaks("gpipe", 4, [A, B])
    assert found[A] == 4 * 10 + 3 + 8  # the gradient of the output has come
    assert found[B] == 4 * (10 + 3) + 8  # all inputs have come


def test_1f1b_holds_no_more_for_more_chunks() -> None:
    assert peaks("1f1b", 8, [A, B]) == peaks("1f1b", 64, [A, B])


def test_on_one_device_an_output_is_the_next_stages_input() -> None:
    both, apart = peaks("gpipe", 4, [A, A])[A], peaks("gpipe", 4, [A, B])
    assert both <= apart[A] + apart[B]


def test_a_recomputed_micro_batch_keeps_its_input_only() -> None:
    # The inputs of all, the clones of all but one, and the graph; the copy of the first input is gone by then.
    assert peaks("gpipe", 4, [A, B], recomputed=4)[B] == 4 * 3 + 4 * 1 - 1 + 10 + 8
    assert peaks("gpipe", 4, [A], recomputed=4)[A] == 3 * 1 + 10 + 8


def test_what_is_on_the_host_does_not_count() -> None:
    stage = replace(STAGE, moved=(6,), moved_alone=(6, 1))

    def peak(recomputed: int, devices: list[torch.device]) -> int:
        schedule = with_offload(with_recompute(build("gpipe", workers=2, chunks=4), recomputed))
        return device_peaks(simulate(schedule).timeline, [stage] * 2, devices, orders=schedule.orders)[devices[1]]

    # In the first backward three graphs are there: its own, that of the next, which comes back, and the newest.
    assert peak(0, [A, B]) == 4 * 3 + 3 * 10 + (10 - 7) + 8
    assert peak(0, [A, A]) < peaks("gpipe", 4, [A, A])[A]
    assert peak(4, [A, B]) == 4 * 3 + 4 * 1 - 1 + 10 + 8 - 3  # the input of one is away


@pytest.mark.parametrize("chunks", [1, 8])
def test_a_loss_outside_joins_the_outputs_and_gets_a_gradient(chunks: int) -> None:
    timeline = simulate(build("gpipe", workers=1, chunks=chunks), loss_outside=True).timeline
    assert device_peaks(timeline, [STAGE], [A], [3] * chunks)[A] == chunks * (10 + 2 * 3) + 8


def test_graphs_copy_inputs_and_targets_of_micro_batches_in_flight() -> None:
    def graphs(name: str, chunks: int, devices: list[torch.device]) -> dict[torch.device, int]:
        schedule = build(name, workers=len(devices), chunks=chunks)
        return device_peaks(simulate(schedule).timeline, [STAGE] * len(devices), devices, (), [2] * chunks)

    assert graphs("gpipe", 4, [A])[A] == peaks("gpipe", 4, [A])[A] + 4 * (3 + 2)
    plain, found = peaks("1f1b", 8, [A, B]), graphs("1f1b", 8, [A, B])
    assert (found[A] - plain[A], found[B] - plain[B]) == (2 * 3, 1 * 2)
