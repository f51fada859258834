"""The links of an engine: made once, and none between stages of one worker."""

import threading
from typing import Any

import torch

from pipework.runtime.device import Link, WorkerDevice
from pipework.runtime.engine import Engine

CPU, META = torch.device("cpu"), torch.device("meta")


def test_a_link_is_made_once_and_none_within_a_worker() -> None:
    unused: Any = None
    engine = Engine(
        stages={},
        placement=(0, 1, 0),
        devices={0: WorkerDevice(CPU), 1: WorkerDevice(META)},
        skips=[],
        backend=unused,
        links={(0, 0): Link(WorkerDevice(CPU), WorkerDevice(META))},  # from the caller to worker 0
        workers=unused,
        lock=threading.Lock(),
        one_thread=False,
    )
    assert engine.link(0, 2) is None
    way = engine.link(1, 2)
    assert isinstance(way, Link)
    assert engine.link(1, 0) is way
    assert engine.link(0, 1) is not way
