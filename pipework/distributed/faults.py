"""Fault injection: has a rank die, hang or fail at a certain point of a training, to rehearse such failures.

A fault is made in code by `fail_at`, or without a change of code by the environment variable ``PIPEWORK_FAULT``::

    PIPEWORK_FAULT="rank=1,step=3,action=B,kind=kill" torchrun --nproc-per-node 2 train.py
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, get_args, get_type_hints

from torch.optim.optimizer import register_optimizer_step_pre_hook

from pipework.schedule.action import KINDS as COMPUTATIONS
from pipework.schedule.action import OF_STAGES, TRANSFERS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

_LOG = logging.getLogger("pipework")

VARIABLE: Final = "PIPEWORK_FAULT"
"""The environment variable that holds faults, in the form of `Fault.parse`, separated by semicolons."""

ACTIONS: Final = (*COMPUTATIONS, *TRANSFERS, *OF_STAGES, "optimizer", "save")
"""Where a fault can strike: before an action of a schedule, an optimizer's step, or the writing of a checkpoint."""

KINDS: Final = ("raise", "exit", "kill", "stop", "hang", "hold_gil", "sleep", "terminate")
"""The kinds of faults; see `fail_at`."""

_DEFAULT_SECONDS: Final = 20.0


class InjectedFault(RuntimeError):
    """Raised by a fault of kind ``"raise"``."""

    __module__ = "pipework.testing"  # the public name, for tracebacks


@dataclass(frozen=True)
class Fault:
    """A fault and its place; made by `fail_at`, whose arguments are its attributes, or by `Fault.parse`.

    Example:
        >>> fault = Fault.parse("rank=1,step=3,action=B,kind=kill")
        >>> fault.matches(rank=1, step=3, action="B", stage=0, micro_batch=2)
        True
        >>> fault.matches(rank=1, step=4, action="B", stage=0, micro_batch=2)
        False
        >>> str(fault)
        'rank=1,step=3,action=B,kind=kill'
    """

    rank: int | None = None
    step: int | None = None
    action: str | None = None
    stage: int | None = None
    micro_batch: int | None = None
    kind: str = "raise"
    seconds: float | None = None
    attempt: int | None = None

    def __post_init__(self) -> None:
        for name, value, known in (("action", self.action, ACTIONS), ("kind", self.kind, KINDS)):
            if value not in known and not (name == "action" and value is None):
                raise ValueError(f"{name}={value!r} of a fault is not known: wanted one of {', '.join(known)}")
        for name in ("rank", "step", "stage", "micro_batch", "attempt"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise ValueError(f"{name} of a fault must be an integer from 0, or None for any: got {value!r}")
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"seconds of a fault must be a positive number, got {self.seconds!r}")

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Reads the text form: ``name=value`` for each attribute that is not None, separated by commas.

        Args:
            text: such as ``"rank=1,step=3,action=B,kind=kill"``; white space around each part is ignored.

        Returns:
            The fault; its ``str`` is such a text again.

        Raises:
            ValueError: the text has another form; the message lists the known names.

        Example:
            >>> Fault.parse("stage=2, kind=sleep, seconds=1.5")
            Fault(rank=None, step=None, action=None, stage=2, micro_batch=None, kind='sleep', seconds=1.5, attempt=None)
            >>> Fault.parse("rank=1,knid=kill")
            Traceback (most recent call last):
            ValueError: 'knid=kill' of the fault 'rank=1,knid=kill' is not known: a fault has rank, step, action, stage,
            micro_batch, kind, seconds, attempt, each as name=value, separated by commas, as in
            'rank=1,step=3,action=B,kind=kill'
        """
        types = get_type_hints(cls)
        values: dict[str, object] = {}
        for part in text.split(","):
            name, equals, value = (each.strip() for each in part.partition("="))
            if not equals or name not in types:
                raise ValueError(
                    f"{part.strip()!r} of the fault {text!r} is not known: a fault has {', '.join(types)}, each as "
                    "name=value, separated by commas, as in 'rank=1,step=3,action=B,kind=kill'"
                )
            if name in values:
                raise ValueError(f"the fault {text!r} has two values of {name}: write one fault for each value")
            wanted = next((kind for kind in (int, float) if kind in get_args(types[name])), str)
            try:
                values[name] = wanted(value)
            except ValueError:
                raise ValueError(f"{name} of the fault {text!r} must be a number, got {value!r}") from None
        if "kind" not in values:
            raise ValueError(f"the fault {text!r} has no kind: add kind= and one of {', '.join(KINDS)}")
        return cls(**values)  # type: ignore[arg-type]

    def __str__(self) -> str:
        values = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        return ",".join(f"{name}={value}" for name, value in values if value is not None)

    def matches(
        self,
        *,
        rank: int,
        step: int | None = None,
        action: str | None = None,
        stage: int | None = None,
        micro_batch: int | None = None,
    ) -> bool:
        """Whether the fault belongs to this place; one with open attributes matches several places.

        Args:
            rank: of this process.
            step: the number of the training step.
            action: that is about to begin.
            stage: of the action; None: it belongs to none.
            micro_batch: of the action; None: all or none of them.
        """
        here = {"rank": rank, "step": step, "action": action, "stage": stage, "micro_batch": micro_batch}
        if any(getattr(self, name) not in (None, value) for name, value in here.items()):
            return False
        return self.attempt is None or self.attempt == current_attempt()

    def strike(self) -> None:
        """Executes the fault, in the calling thread.

        Raises:
            InjectedFault: the kind is ``"raise"``.
            SystemExit: the kind is ``"exit"``.
        """
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
                self._stop()
            case "sleep":
                time.sleep(_DEFAULT_SECONDS if self.seconds is None else self.seconds)
            case "hold_gil":
                _hold_gil(_DEFAULT_SECONDS if self.seconds is None else self.seconds)
            case _:
                end = None if self.seconds is None else time.monotonic() + self.seconds
                while end is None or time.monotonic() < end:
                    pass

    def _stop(self) -> None:
        if self.seconds is not None:  # a stopped process cannot continue itself
            subprocess.Popen(["sh", "-c", f"sleep {self.seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)


def fail_at(
    *,
    rank: int | None = None,
    step: int | None = None,
    action: str | None = None,
    stage: int | None = None,
    micro_batch: int | None = None,
    kind: str = "raise",
    seconds: float | None = None,
    attempt: int | None = None,
) -> Fault:
    """A fault that strikes just before an action. An argument that is left out matches everything.

    Args:
        rank: of the process.
        step: the training step, from 0.
        action: ``"F"``, ``"B"``, ``"I"``, ``"W"`` or ``"R"`` of a schedule, ``"SEND_F"``, ``"RECV_F"``, ``"SEND_B"`` or
            ``"RECV_B"`` between ranks, ``"REDUCE_GRAD"``, ``"UNSHARD"`` or ``"RESHARD"`` of a stage, ``"optimizer"`` or
            ``"save"``.
        stage: of the action.
        micro_batch: of the action, from 0.
        kind: of fault:

            * ``"raise"``: an `InjectedFault` is raised, as by a bug in a layer;
            * ``"exit"``: ``SystemExit(1)`` is raised, as by a program that ends early;
            * ``"kill"``: the process gets SIGKILL, as when the machine has no memory left;
            * ``"stop"``: the process gets SIGSTOP: it is alive, but none of its code runs, as on a machine that hangs;
            * ``"hang"``: an endless loop in Python, while other threads run;
            * ``"hold_gil"``: no Python code of the process runs, as in a library that does not release the GIL;
            * ``"sleep"``: the process is slow, which is no failure;
            * ``"terminate"``: the process gets SIGTERM, as from a cluster that preempts the job.
        seconds: that the fault lasts; by default 20 for ``"sleep"`` and ``"hold_gil"``, no end for ``"stop"`` and
            ``"hang"``.
        attempt: only in this start of a job that a launcher restarts after failures, from 0; the environment variable
            ``TORCHELASTIC_RESTART_COUNT`` has its number.

    Returns:
        The fault, which does nothing until its `strike` is called.

    Raises:
        ValueError: there is no such action or kind, or a number is negative.

    Example:
        >>> fault = fail_at(rank=0, step=2, action="F")
        >>> if fault.matches(rank=0, step=2, action="F", stage=0, micro_batch=0):
        ...     fault.strike()
        Traceback (most recent call last):
        pipework.testing.InjectedFault: injected on purpose: rank=0,step=2,action=F,kind=raise
    """
    return Fault(rank, step, action, stage, micro_batch, kind, seconds, attempt)


def faults_from_environment() -> tuple[Fault, ...]:
    """The faults in the environment variable ``PIPEWORK_FAULT``, separated by semicolons; mostly none.

    Raises:
        ValueError: the variable cannot be read; the message shows it, and lists the known names.

    Example:
        >>> faults_from_environment()
        ()
    """
    whole = os.environ.get(VARIABLE, "")
    try:
        return tuple(Fault.parse(text) for text in whole.split(";") if text.strip())
    except ValueError as error:
        raise ValueError(f"the environment variable {VARIABLE} is {whole!r}, which is no fault: {error}") from None


def current_attempt() -> int:
    """How often the launcher has restarted this job; 0 in the first start and without a launcher.

    Example:
        >>> current_attempt()
        0
    """
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(count) if count.isdecimal() else 0


def _hold_gil(seconds: float) -> None:
    """Waits inside a C function that holds the interpreter's lock.

    A free-threaded Python has no such lock. There the other threads run until one needs all to pause, which this one
    does not do: mostly the collector of garbage.
    """
    poll = ctypes.PyDLL(None).poll  # unlike CDLL, it does not release the lock
    poll.argtypes = [ctypes.c_void_p, ctypes.c_ulong, ctypes.c_int]
    ended = threading.Event()

    def collect() -> None:
        while not ended.is_set():
            gc.collect()

    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        threading.Thread(target=collect, daemon=True).start()
    poll(None, 0, int(seconds * 1000))
    ended.set()


class Faults:
    """The faults that may strike in this process.

    Args:
        faults: all of them.
        rank: of this process.

    Attributes:
        step: the number of the current training step; -1 before the first.
    """

    def __init__(self, faults: Iterable[Fault], rank: int) -> None:
        self._faults = [fault for fault in faults if fault.rank in (None, rank)]
        self._rank = rank
        self.step = -1
        if any(fault.action == "optimizer" for fault in self._faults):
            register_optimizer_step_pre_hook(lambda *_: self.strike("optimizer"))

    @classmethod
    def of_environment(cls, rank: int, ranks: Collection[int], stages: int) -> Faults:
        """The faults in the environment variable.

        Args:
            rank: of this process.
            ranks: of all processes.
            stages: the number of stages of the pipe.

        Raises:
            ValueError: the variable cannot be read, or names a rank or a stage that does not exist.
        """
        faults = faults_from_environment()
        for fault in faults:
            if fault.rank is not None and fault.rank not in ranks:
                raise ValueError(f"{VARIABLE}: {fault} never strikes, as the ranks are {', '.join(map(str, ranks))}")
            if fault.stage is not None and fault.stage >= stages:
                raise ValueError(f"{VARIABLE}: {fault} never strikes, as the stages are 0 to {stages - 1}")
        return cls(faults, rank)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._faults)

    def strike(self, action: str, stage: int | None = None, micro_batch: int | None = None) -> None:
        """Executes the faults of this place; called before each action.

        Args:
            action: the kind of the action that is about to begin.
            stage: of the action; None: it belongs to none.
            micro_batch: of the action; None: it belongs to none.
        """
        for fault in self._faults:
            if fault.matches(rank=self._rank, step=self.step, action=action, stage=stage, micro_batch=micro_batch):
                self._log(fault, action, stage, micro_batch)
                fault.strike()

    def _log(self, fault: Fault, action: str, stage: int | None, micro_batch: int | None) -> None:
        """Logs a fault before it strikes: afterwards the process may be gone."""
        place = [f"rank {self._rank}", f"step {self.step}", f"action {action}"]
        place += [] if stage is None else [f"stage {stage}"]
        place += [] if micro_batch in (None, -1) else [f"micro-batch {micro_batch}"]
        _LOG.warning("an injected fault strikes at %s: %s (%s=%s)", ", ".join(place), fault.kind, VARIABLE, fault)
