"""Devices on the CPU; those of accelerators are in tests/test_gpu.py."""

import time

import torch

from pipework.runtime.device import Link, WorkerDevice, is_accelerator, link

CPU, META = torch.device("cpu"), torch.device("meta")


def test_the_cpu_has_no_stream_and_no_generator_that_workers_share() -> None:
    device = WorkerDevice(CPU)
    assert not is_accelerator(CPU)
    assert device.stream is None
    assert device.unseen_draws is None
    for step in (device.begin_thread, device.wait_for_caller, lambda: device.hand_over([torch.zeros(1), None])):
        step()  # nothing to synchronise


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

    def record_event(self) -> _Event:
        return _Event()
