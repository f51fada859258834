"""Validation: whether a schedule can be executed without a deadlock, checked before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pipework.schedule.action import Action
from pipework.schedule.analysis.channels import Channel, check_channel
from pipework.schedule.analysis.events import LOSS, Deadlock, Run, run
from pipework.schedule.analysis.memory import SLACK, amounts, each_limit
from pipework.schedule.analysis.rules import Violation, ascending, broken
from pipework.schedule.costs import Costs, StageCosts, checked
from pipework.schedule.edges import counterpart, maker
from pipework.schedule.passes.posting import posted, timed_for_posting
from pipework.schedule.schedule import Schedule, checked_schedule


class ScheduleError(ValueError):
    """A schedule that cannot be executed, or none that can; the message names worker, action or limit, and reason."""

    __module__ = "pipework.schedule"  # the public name, for tracebacks


@dataclass(frozen=True)
class Validation:
    """The result of :func:`validate`.

    Attributes:
        name: the schedule's name.
        violations: all problems; empty if the schedule can be executed.
        ascending: whether every stage forms its parameter gradients in the order of micro-batches 0, 1, 2, .., which
            makes results bitwise equal to those of a plain loop over micro-batches.
    """

    name: str
    violations: tuple[Violation, ...]
    ascending: bool

    @property
    def ok(self) -> bool:
        """Whether the schedule can be executed."""
        return not self.violations

    def raise_if_invalid(self) -> None:
        """Raise the first violation, if there is one.

        Raises:
            ScheduleError: the schedule cannot be executed.
        """
        if self.violations:
            more = f" (and {len(self.violations) - 1} more)" if len(self.violations) > 1 else ""
            raise ScheduleError(f"schedule {self.name!r} cannot be executed: {self.violations[0].message}{more}")


@dataclass(frozen=True)
class ValidationOptions:
    """The options of :func:`validate`, and of a simulation."""

    loss_outside: bool = False
    channel: Channel = "unbounded"
    memory_limit: float | Sequence[float] | None = None


def validate(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    loss_outside: bool = False,
    channel: Channel = "unbounded",
    memory_limit: float | Sequence[float] | None = None,
) -> Validation:
    """Check that a schedule can be executed.

    1. Every forward and every backward (``B``, or ``I`` and ``W``) of every stage and micro-batch is there once, on the
       worker that holds the stage; a recompute at most once. A schedule for inference has no backwards. If there are
       transfers, each value and gradient between workers is sent after the action that makes it and received before
       the action that needs it. If there are reductions, each stage has one, after the last action that adds to its
       gradient. If weights are gathered, that happens before their use.
    2. There is no deadlock if workers run their orders, wait for the data that they need, and use channels that keep
       the order in which transfers are posted.
    3. No worker ever exceeds the memory limit.

    2 and 3 are checked only if 1 holds.

    Args:
        schedule: any schedule.
        costs: the memory of activations; a unit for each stage and micro-batch if None. Times do not matter.
        loss_outside: whether the loss is computed outside of the pipe, so that all forwards must end before the first
            backward.
        channel: the transport of transfers, see :mod:`pipework.schedule.analysis.channels`. Transfers are added to a
            schedule without them, as by :func:`with_communication`.
        memory_limit: the most memory that a worker may hold, or a number for each worker; None: no limit.

    Returns:
        All violations, and whether gradients are formed in ascending order.

    Raises:
        TypeError: the schedule, the costs or a limit have a wrong type.
        ValueError: the channel is unknown, a limit is out of range, or the costs are for another number of stages.

    Example:
        >>> from pipework.schedule import Action, Schedule, from_csv
        >>> wrong = Schedule("wrong", (0,), ((Action("B", 0, 0), Action("F", 0, 0)),))
        >>> validate(wrong).violations[0].message
        'worker 0 waits forever at 0B0: it needs 0F0, which is later in its own order'
        >>> validate(from_csv("0F0,0F1,0B0,0B1"), memory_limit=1).violations[0].message
        'worker 0 holds 2 at 0F1, more than its limit of 1'
    """
    spread = checked(costs).spread(checked_schedule(schedule).stages, len(schedule.skips))
    violations, _, _ = examine(schedule, spread, ValidationOptions(loss_outside, channel, memory_limit))
    return Validation(schedule.name, violations, ascending(schedule))


def check(schedule: Schedule, costs: Costs | None = None, **options: Any) -> None:
    """Refuse a schedule that cannot be executed; arguments are those of :func:`validate`.

    Raises:
        ScheduleError: the first violation.

    Example:
        >>> from pipework.schedule import fill_drain
        >>> check(fill_drain(4, 8))
    """
    validate(schedule, costs, **options).raise_if_invalid()


def examine(
    schedule: Schedule, costs: StageCosts, options: ValidationOptions
) -> tuple[tuple[Violation, ...], Schedule, Run | None]:
    """Validate, and return the violations, the schedule that was run, and the run; None if orders are broken.

    The schedule that was run has transfers if the channel needs them. Simulation uses the times of the run.

    Example:
        >>> from pipework.schedule import fill_drain
        >>> violations, _, ended = examine(fill_drain(1, 1), Costs().spread(stages=1), ValidationOptions())
        >>> violations, list(ended.ends[0])
        ((), [1.0, 3.0])
    """
    check_channel(options.channel)
    limits = each_limit(options.memory_limit, schedule.workers)
    violations = broken(schedule)
    if violations:
        return violations, schedule, None
    loss_outside, channel = options.loss_outside, options.channel
    if channel != "unbounded" and not schedule.communicates:
        timed = timed_for_posting(schedule, costs)
        # A deadlock without transfers remains with them, and its messages are simpler without.
        schedule = schedule if timed.deadlocks else posted(schedule, timed, channel)
    ended = run(schedule, costs, loss_outside=loss_outside, channel=channel)
    if not ended.deadlocks:
        full = () if options.memory_limit is None else tuple(_over(schedule, costs, limits))
        return full, schedule, ended
    causes_first = sorted(ended.deadlocks, key=lambda each: _distance_from_cause(schedule, ended, each))
    return tuple(_waiting(schedule, ended, each, channel) for each in causes_first), schedule, ended


def _distance_from_cause(schedule: Schedule, ended: Run, deadlock: Deadlock) -> int:
    """A worker that waits for its own order, or in a queue, is a cause; one that waits for another, a consequence."""
    worker, _, missing = deadlock
    if missing == LOSS:
        return 1
    if missing.peer >= 0:
        return 0 if _has_been_sent(schedule, ended, counterpart(missing)) else 2
    return 0 if schedule.placement[missing.stage] == worker else 2


def _has_been_sent(schedule: Schedule, ended: Run, send: Action) -> bool:
    """Whether the worker reached this action, so that the transfer waits in a queue."""
    sender = schedule.placement[send.stage]
    return schedule.orders[sender].index(send) < len(ended.starts[sender])


def _over(schedule: Schedule, costs: StageCosts, limits: Sequence[float]) -> Iterator[Violation]:
    """For each worker the first action that exceeds its limit."""
    for worker, order in enumerate(schedule.orders):
        for action, most in zip(order, amounts(schedule, order, costs)[0], strict=True):
            if most > limits[worker] * SLACK:
                text = f"worker {worker} holds {most:.6g} at {action}, more than its limit of {limits[worker]:.6g}"
                yield Violation(worker, action, text)
                break


def _waiting(schedule: Schedule, ended: Run, deadlock: Deadlock, channel: Channel) -> Violation:
    worker, action, missing = deadlock
    if missing == LOSS:
        why = (
            "it needs the loss, which is computed outside of the pipe and needs all forwards first, including those "
            "after it"
        )
    elif missing.peer >= 0:
        send = counterpart(missing)
        why = f"it needs {missing}, but worker {schedule.placement[send.stage]} never reaches {send}"
        if _has_been_sent(schedule, ended, send):
            why = (
                f"it needs {missing}, which waits in a queue behind transfers that the other side posts later; "
                f"with_communication(..., channel={channel!r}) makes matching orders"
            )
    else:
        home = schedule.placement[missing.stage]
        shown = maker(missing, schedule.orders[home], schedule.table)
        where = "is later in its own order" if home == worker else f"worker {home} never reaches"
        why = f"it needs {shown}, which {where}"
    return Violation(worker, action, f"worker {worker} waits forever at {action}: {why}")
