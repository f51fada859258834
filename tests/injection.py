"""Faults on purpose: a rank dies, hangs or fails at a certain point of a training.

A program under test calls `install()`, and the environment variable ``PIPEWORK_FAULT`` says where what happens::

    PIPEWORK_FAULT="rank=1,step=3,action=B,kind=kill"

An action is one of a schedule's, "optimizer" or "save". Kinds: "raise" (an `InjectedFault`), "exit" (SystemExit),
"kill" (SIGKILL), "stop" (SIGSTOP), "hang" (an endless loop), "hold_gil" (no Python code runs), "sleep" and "terminate"
(SIGTERM).
"""

import ctypes
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from pipework.distributed.backend import DistributedBackend

VARIABLE = "PIPEWORK_FAULT"
_SECONDS = 20.0  # of "sleep" and "hold_gil"; "stop" and "hang" have no end


class InjectedFault(RuntimeError):
    """Raised by a fault of the kind "raise"."""


@dataclass(frozen=True)
class Fault:
    """A fault and its place; what is None matches everything."""

    rank: int | None = None
    step: int | None = None
    action: str | None = None
    stage: int | None = None
    micro_batch: int | None = None
    kind: str = "raise"
    seconds: float | None = None
    attempt: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Fault":
        pairs = dict(part.strip().split("=") for part in text.split(","))
        kinds: dict[str, Callable[[str], Any]] = {"action": str, "kind": str, "seconds": float}
        return cls(**{name: kinds.get(name, int)(value) for name, value in pairs.items()})

    def __str__(self) -> str:
        values = [(each.name, getattr(self, each.name)) for each in fields(self)]
        return ",".join(f"{name}={value}" for name, value in values if value is not None)

    def matches(self, **place: object) -> bool:
        place["attempt"] = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        return all(getattr(self, name) in (None, value) for name, value in place.items())

    def strike(self) -> None:
        seconds = _SECONDS if self.seconds is None else self.seconds
        match self.kind:
            case "raise":
                raise InjectedFault(f"injected on purpose: {self}")
            case "exit":
                raise SystemExit(1)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "terminate":
                os.kill(os.getpid(), signal.SIGTERM)
            case "stop":
                if self.seconds is not None:  # a stopped process cannot continue itself
                    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
            case "sleep":
                time.sleep(seconds)
            case "hold_gil":
                _hold_gil(seconds)
            case _:
                end = None if self.seconds is None else time.monotonic() + seconds
                while end is None or time.monotonic() < end:
                    pass


def _hold_gil(seconds: float) -> None:
    """Waits inside a C function that holds the interpreter's lock.

    A free-threaded Python has no such lock. There the other threads run until one needs all to pause, which this one
    does not do: mostly the collector of garbage.
    """
    poll = ctypes.PyDLL(None).poll  # unlike CDLL, it does not release the lock
    poll.argtypes = [ctypes.c_void_p, ctypes.c_ulong, ctypes.c_int]
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        threading.Thread(target=lambda: [gc.collect() for _ in iter(int, 1)], daemon=True).start()
    poll(None, 0, int(seconds * 1000))


def install() -> None:
    """From now on the faults of the environment variable strike in this process, which is a rank of a job."""
    faults = [Fault.parse(text) for text in os.environ.get(VARIABLE, "").split(";") if text.strip()]
    if not faults:
        return
    rank, step = int(os.environ.get("RANK", "0")), -1

    def strike(action: str, stage: int | None = None, micro_batch: int | None = None) -> None:
        for fault in faults:
            if fault.matches(rank=rank, step=step, action=action, stage=stage, micro_batch=micro_batch):
                logging.getLogger("pipework").warning("an injected fault strikes: %s", fault)
                fault.strike()

    begin, share = DistributedBackend.begin, DistributedBackend._gather_compared
    before_action = DistributedBackend.before_action

    def counted(self: DistributedBackend, call: Any, *given: Any) -> Any:
        nonlocal step
        step += call.training and call.grad
        return begin(self, call, *given)

    def struck(self: DistributedBackend, action: Any) -> None:
        before_action(self, action)
        strike(action.kind, action.stage, action.micro_batch)

    def shared(self: DistributedBackend, name: str, text: str) -> list[str]:
        if name == "everyone":  # a checkpoint is written
            strike("save")
        return share(self, name, text)

    DistributedBackend.begin = counted  # type: ignore[method-assign]
    DistributedBackend.before_action = struck  # type: ignore[method-assign]
    DistributedBackend._gather_compared = shared  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(lambda *_: strike("optimizer"))
