"""Devices on the CPU; those of accelerators are in tests/test_gpu.py."""

import torch

from pipework.runtime.device import Link, WorkerDevice, link

CPU, META = torch.device("cpu"), torch.device("meta")


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
