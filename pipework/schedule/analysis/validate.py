"""Can a schedule be executed? Checked before the first action, so that no run ends in a wait for ever."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipework.schedule.action import Action
from pipework.schedule.analysis.channels import Channel, check_channel
from pipework.schedule.analysis.events import LOSS, Run, Stuck, run
from pipework.schedule.analysis.memory import each_limit, exceeds, rows
from pipework.schedule.analysis.rules import Violation, ascending, broken
from pipework.schedule.costs import Costs, StageCosts, checked
from pipework.schedule.edges import counterpart
from pipework.schedule.passes.posting import posted, timed_for_posting
from pipework.schedule.schedule import Schedule, checked_schedule


class ScheduleError(ValueError):
    """A schedule that cannot be executed; the message names worker, action and reason."""

    __module__ = "pipework.schedule"  # the public name, for tracebacks


@dataclass(frozen=True)
class Validation:
    """What :func:`validate` found.

    Attributes:
        name: the schedule's name.
        violations: everything that is wrong; empty if the schedule can be executed.
        ascending: whether every stage forms its parameter gradients in the order of micro-batches 0, 1, 2, .., which
            makes results equal bit by bit to a plain loop over micro-batches.
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
        raise_first(self.name, self.violations)


@dataclass(frozen=True)
class Conditions:
    """Under which a schedule is to be executed; the words are those of :func:`validate`."""

    loss_outside: bool = False
    channel: Channel = "unbounded"
    memory_limit: float | Sequence[float] | None = None


def raise_first(name: str, violations: Sequence[Violation]) -> None:
    """Raise the first violation of the schedule called ``name``, if there is one.

    Raises:
        ScheduleError: there is one.
    """
    if violations:
        more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
        raise ScheduleError(f"schedule {name!r} cannot be executed: {violations[0].message}{more}")


def validate(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    loss_outside: bool = False,
    channel: Channel = "unbounded",
    memory_limit: float | Sequence[float] | None = None,
) -> Validation:
    """Check that a schedule can be executed.

    1. Every forward and every backward (``B``, or ``I`` and ``W``) of every stage and micro-batch stands exactly once,
       on the worker that holds the stage; a recompute stands at most once. A schedule of inference has no backwards. If
       there are transfers, all that crosses from worker to worker is sent, behind what makes it, and received, before
       what needs it. If there are reductions, each stage has one, behind all that adds to its gradient. Where weights
       are gathered, that is before they are needed.
    2. Workers that run their orders, each waiting for the data it needs, all come to the end, on channels that keep
       the order in which transfers are posted.
    3. No worker ever holds more than the limit.

    The others are tried only if the first holds.

    Args:
        schedule: any.
        costs: how much memory activations hold; a unit for each stage and micro-batch if None. Times decide nothing.
        loss_outside: the loss is computed outside of the pipe, so that all forwards must end before the first backward.
        channel: what carries the transfers, see :mod:`pipework.schedule.analysis.channels`. To a schedule without
            transfers, they are added as :func:`with_communication` does.
        memory_limit: the most that a worker may hold, or a number for each worker; None: anything.

    Returns:
        All violations that were found, and whether gradients are formed in ascending order.

    Raises:
        TypeError: no schedule, no costs, or a limit that is not a number.
        ValueError: an unknown channel, an impossible limit, or costs for other stages.

    Example:
        >>> from pipework.schedule import Action, Schedule, from_orders_text
        >>> wrong = Schedule("wrong", (0,), ((Action("B", 0, 0), Action("F", 0, 0)),))
        >>> validate(wrong).violations[0].message
        'worker 0 waits for ever at 0B0: it needs 0F0, which stands later in its own order'
        >>> validate(from_orders_text('''
        ...     schedule greedy
        ...     placement 0
        ...     worker 0 0F0 0F1 0B0 0B1'''), memory_limit=1).violations[0].message
        'worker 0 holds 2 at 0F1, more than its limit of 1'
    """
    spread = checked(costs).spread(checked_schedule(schedule).stages, len(schedule.skips))
    violations, _, _ = examine(schedule, spread, Conditions(loss_outside, channel, memory_limit))
    return Validation(schedule.name, violations, ascending(schedule))


def check(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    loss_outside: bool = False,
    channel: Channel = "unbounded",
    memory_limit: float | Sequence[float] | None = None,
) -> None:
    """Refuse a schedule that cannot be executed; see :func:`validate`.

    Raises:
        ScheduleError: the first violation.

    Example:
        >>> from pipework.schedule import fill_drain
        >>> check(fill_drain(4, 8))
    """
    found = validate(schedule, costs, loss_outside=loss_outside, channel=channel, memory_limit=memory_limit)
    found.raise_if_invalid()


def examine(
    schedule: Schedule, costs: StageCosts, conditions: Conditions
) -> tuple[tuple[Violation, ...], Schedule, Run | None]:
    """The violations of a schedule, the schedule that was run to find them, and the run; None if it was not worth one.

    For those who need the run's times as well, so that it takes place once. What was run has transfers if channels ask
    for them.

    Example:
        >>> from pipework.schedule import fill_drain
        >>> violations, _, ended = examine(fill_drain(1, 1), Costs().spread(stages=1), Conditions())
        >>> violations, ended.times
        ((), (((0.0, 1.0), (1.0, 3.0)),))
    """
    check_channel(conditions.channel)
    limits = each_limit(conditions.memory_limit, schedule.workers)
    violations = broken(schedule)
    if violations:
        return violations, schedule, None
    loss_outside, channel = conditions.loss_outside, conditions.channel
    if channel != "unbounded" and not schedule.communicates:
        timed = timed_for_posting(schedule, costs)
        # Who cannot end without transfers cannot end with them, and is easier to understand without.
        schedule = schedule if timed.stuck else posted(schedule, timed, channel)
    ended = run(schedule, costs, loss_outside=loss_outside, channel=channel)
    if not ended.stuck:
        full = () if conditions.memory_limit is None else tuple(_over(schedule, costs, limits))
        return full, schedule, ended
    stuck = sorted(ended.stuck, key=lambda each: _distance_from_cause(schedule, ended, each))
    return tuple(_waiting(schedule, ended, each, channel) for each in stuck), schedule, ended


def _distance_from_cause(schedule: Schedule, ended: Run, stuck: Stuck) -> int:
    """Who waits for its own order, or in a queue, is the cause; who waits for another worker, the consequence."""
    worker, _, missing = stuck
    if missing == LOSS:
        return 1
    if missing.peer >= 0:
        return 0 if _has_been_sent(schedule, ended, counterpart(missing)) else 2
    return 0 if schedule.placement[missing.stage] == worker else 2


def _has_been_sent(schedule: Schedule, ended: Run, send: Action) -> bool:
    """Whether the worker came to this action, so that the transfer waits in a queue."""
    sender = schedule.placement[send.stage]
    return schedule.orders[sender].index(send) < len(ended.times[sender])


def _over(schedule: Schedule, costs: StageCosts, limits: Sequence[float]) -> Iterator[Violation]:
    """For each worker the first action at which it holds too much."""
    for worker, (order, row) in enumerate(zip(schedule.orders, rows(schedule, costs), strict=True)):
        for action, (most, _) in zip(order, row, strict=True):
            if exceeds(most, limits[worker]):
                text = f"worker {worker} holds {most:.6g} at {action}, more than its limit of {limits[worker]:.6g}"
                yield Violation(worker, action, text)
                break


def _waiting(schedule: Schedule, ended: Run, stuck: Stuck, channel: Channel) -> Violation:
    worker, action, missing = stuck
    if missing == LOSS:
        why = (
            "it needs the loss, which is computed outside of the pipe and needs every forward first, also those that "
            "stand behind it"
        )
    elif missing.peer >= 0:
        why = f"it needs {missing}, {_why_not_received(schedule, ended, missing, channel)}"
    else:
        home = schedule.placement[missing.stage]
        # A product of a backward is named after I; people look for what stands in the order.
        shown = missing if missing in schedule.orders[home] else Action("B", missing.stage, missing.micro_batch)
        where = "stands later in its own order" if home == worker else f"worker {home} never comes to"
        why = f"it needs {shown}, which {where}"
    return Violation(worker, action, f"worker {worker} waits for ever at {action}: {why}")


def _why_not_received(schedule: Schedule, ended: Run, receive: Action, channel: Channel) -> str:
    send = counterpart(receive)
    sender, receiver = schedule.placement[send.stage], schedule.placement[receive.stage]
    if not _has_been_sent(schedule, ended, send):
        return f"but worker {sender} never comes to {send}"
    # Both have been posted, so something is before them in a queue.
    pair = (sender, receiver) if channel == "pair" else None
    heads = [_head(schedule, ended, worker, pair) for worker in (sender, receiver)]
    queue = "between them" if channel == "pair" else "of each"
    return (
        f"but in the channel {queue} worker {sender} is first to do {heads[0]}, worker {receiver} {heads[1]}; "
        f"with_communication(..., channel={channel!r}) finds an order for both"
    )


def _head(schedule: Schedule, ended: Run, worker: int, pair: tuple[int, int] | None) -> Action | None:
    """The first transfer that a worker has posted and that never took place; if asked, from one worker to another."""
    for action, (start, _) in zip(schedule.orders[worker], ended.times[worker], strict=False):
        if math.isnan(start):
            send = action if action.kind.startswith("SEND") else counterpart(action)
            if pair in (None, (schedule.placement[send.stage], schedule.placement[send.peer])):
                return action
    return None
