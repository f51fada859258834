"""Can a schedule be executed? Checked before the first action, so that no run ends in a wait for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipework.schedule.action import Action
from pipework.schedule.costs import Costs, StageCosts
from pipework.schedule.events import LOSS, Run, Stuck, run
from pipework.schedule.schedule import Schedule


class ScheduleError(ValueError):
    """A schedule that cannot be executed; the message names worker, action and reason."""


@dataclass(frozen=True)
class Violation:
    """One thing that is wrong with a schedule.

    Attributes:
        worker: where.
        action: which.
        message: what is wrong with it, a whole sentence.
    """

    worker: int
    action: Action
    message: str


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


def raise_first(name: str, violations: Sequence[Violation]) -> None:
    """Raise the first violation of the schedule called ``name``, if there is one.

    Raises:
        ScheduleError: there is one.
    """
    if violations:
        more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
        raise ScheduleError(f"schedule {name!r} cannot be executed: {violations[0].message}{more}")


def validate(schedule: Schedule, *, loss_outside: bool = False) -> Validation:
    """Check that a schedule can be executed.

    1. Every forward and every backward (``B``, or ``I`` and ``W``) of every stage and micro-batch stands exactly once,
       on the worker that holds the stage; a recompute stands at most once. A schedule of inference has no backwards.
    2. Workers that run their orders, each waiting for the data it needs, all come to the end.

    The second is tried only if the first holds.

    Args:
        schedule: any.
        loss_outside: the loss is computed outside of the pipe, so that all forwards must end before the first backward.

    Returns:
        All violations that were found, and whether gradients are formed in ascending order.

    Example:
        >>> from pipework.schedule import Action, Schedule
        >>> wrong = Schedule("wrong", (0,), ((Action("B", 0, 0), Action("F", 0, 0)),))
        >>> validate(wrong).violations[0].message
        'worker 0 waits for ever at 0B0: it needs 0F0, which stands later in its own order'
    """
    violations, _ = examine(schedule, Costs().spread(schedule.stages), loss_outside=loss_outside)
    return Validation(schedule.name, violations, _ascending(schedule))


def check(schedule: Schedule, *, loss_outside: bool = False) -> None:
    """Refuse a schedule that cannot be executed; see :func:`validate`.

    Raises:
        ScheduleError: the first violation.

    Example:
        >>> from pipework.schedule import fill_drain
        >>> check(fill_drain(4, 8))
    """
    validate(schedule, loss_outside=loss_outside).raise_if_invalid()


def examine(
    schedule: Schedule, costs: StageCosts, *, loss_outside: bool = False
) -> tuple[tuple[Violation, ...], Run | None]:
    """The violations of a schedule, and the run that looked for them; None if it was not worth a run.

    For those who need the run's times as well, so that it takes place once.

    Example:
        >>> from pipework.schedule import fill_drain
        >>> violations, ended = examine(fill_drain(1, 1), Costs().spread(stages=1))
        >>> violations, ended.times
        ((), (((0.0, 1.0), (1.0, 3.0)),))
    """
    violations = tuple(_misplaced(schedule)) + tuple(_miscounted(schedule))
    if violations:
        return violations, None
    ended = run(schedule, costs, loss_outside=loss_outside)
    # Who waits for something further on in its own order is the cause; who waits for another worker, the consequence.
    stuck = sorted(
        ended.stuck, key=lambda each: each.missing == LOSS or schedule.placement[each.missing.stage] != each.worker
    )
    return tuple(_waiting(schedule, each) for each in stuck), ended


def _misplaced(schedule: Schedule) -> Iterator[Violation]:
    for worker, order in enumerate(schedule.orders):
        for action in order:
            home = schedule.placement[action.stage]
            if home != worker:
                where = f"stands in the order of worker {worker}, but stage {action.stage} is on worker {home}"
                yield Violation(worker, action, f"{action} {where}")


def _miscounted(schedule: Schedule) -> Iterator[Violation]:
    count = Counter(action for order in schedule.orders for action in order)
    for worker, order in enumerate(schedule.orders):
        for action in dict.fromkeys(order):
            if count[action] > 1:
                yield Violation(worker, action, f"{action} stands {count[action]} times, wanted once")
    for stage, worker in enumerate(schedule.placement):
        missing = f"is missing in the order of worker {worker}"
        for micro_batch in range(schedule.micro_batches):
            forward, full, inputs, weights = (Action(kind, stage, micro_batch) for kind in "FBIW")
            if not count[forward]:
                yield Violation(worker, forward, f"{forward} {missing}")
            if schedule.inference:
                continue
            halves = [half for half in (inputs, weights) if count[half]]
            if count[full] and halves:
                both = f"worker {worker} has {full} and {halves[0]} too: wanted B, or I and W, but not both"
                yield Violation(worker, full, both)
            elif not count[full] and not halves:
                yield Violation(worker, full, f"{full} (or {inputs} and {weights}) {missing}")
            elif len(halves) == 1:
                lone = weights if halves == [inputs] else inputs
                yield Violation(worker, lone, f"{lone} {missing}, which has {halves[0]}")


def _waiting(schedule: Schedule, stuck: Stuck) -> Violation:
    worker, action, missing = stuck
    if missing == LOSS:
        why = "it needs the loss, which is computed outside of the pipe and needs every forward first"
    else:
        home = schedule.placement[missing.stage]
        # A product of a backward is named after I; people look for what stands in the order.
        shown = missing if missing in schedule.orders[home] else Action("B", missing.stage, missing.micro_batch)
        where = "stands later in its own order" if home == worker else f"worker {home} never comes to"
        why = f"it needs {shown}, which {where}"
    return Violation(worker, action, f"worker {worker} waits for ever at {action}: {why}")


def _ascending(schedule: Schedule) -> bool:
    # B adds to every parameter's gradient, W to those whose part is put off, I to the others. So along each of the
    # chains (B, W) and (B, I) of a stage, micro-batches must ascend.
    latest: dict[tuple[str, int], int] = {}
    for order in schedule.orders:
        for kind, stage, micro_batch, _ in order:
            for chain in {"B": "WI", "W": "W", "I": "I"}.get(kind, ""):
                if micro_batch < latest.get((chain, stage), -1):
                    return False
                latest[chain, stage] = micro_batch
    return True
