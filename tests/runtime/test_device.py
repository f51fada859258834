"""Devices on the CPU; those of accelerators are in tests/test_gpu.py."""

import time

import pytest
import torch

from pipework.runtime.device import Link, WorkerDevice, is_accelerator, link

CPU, META = torch.device("cpu"), torch.device("meta")


def test_the_cpu_has_no_stream_and_no_generator_that_workers_share() -> None:
    device = WorkerDevice(CPU)
    assert not is_accelerator(CPU)
    assert device.stream is None
    assert device.generator is None
    for step in (device.begin_thread, device.wait_for_caller, lambda: device.hand_over([torch.zeros(1), None])):
        step()  # nothing to synchronise


def test_a_wait_is_not_noted_for_what_a_worker_launches_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    launched, seen = 0, []

    class Stream:
        def wait_stream(self, worker: object) -> None:
            nonlocal launched
            seen.append(launched)
            if launched == 1 and self is not device.stream:  # as another thread that has the lock may
                launched = 2
                device.wait_for_caller()

    device = WorkerDevice(CPU)
    device.stream, caller = Stream(), Stream()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: caller)
    device.wait_for_caller()
    launched = 1
    device.hand_over([], locked=False)
    device.hand_over([])
    assert seen == [0, 1, 2, 2], "the caller's stream waits for the second launch, too"
    device.hand_over([])
    device.hand_over([], locked=False)
    assert seen == [0, 1, 2, 2], "and once is enough"


def test_the_clock_of_the_cpu_is_perf_counter() -> None:
    clock = WorkerDevice(CPU).clock()
    before, mark, after = time.perf_counter(), clock.now(), time.perf_counter()
    assert before <= clock.seconds(mark) <= after


def test_tensors_go_from_one_cpu_worker_to_another_without_a_link() -> None:
    assert link(WorkerDevice(CPU), WorkerDevice(CPU)) is None


def test_a_link_to_another_device_copies_and_keeps_requires_grad() -> None:
    way = link(WorkerDevice(CPU), WorkerDevice(META))
    assert isinstance(way, Link)
    way.copy_streams = [_Stream()]
    copies, event = way.depart((torch.ones(2, requires_grad=True), None, torch.ones(1)))
    assert [copy if copy is None else (copy.device, copy.requires_grad) for copy in copies] == [
        (META, True), None, (META, False)
    ]  # fmt: skip
    assert event is not None
    way.arrive(copies, event)
    assert event.synchronized, "a worker without a stream waits for the copy itself"


class _Event:
    synchronized = False

    def synchronize(self) -> None:
        self.synchronized = True


class _Stream:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def record_event(self, event: _Event | None) -> _Event:
        return event or _Event()
