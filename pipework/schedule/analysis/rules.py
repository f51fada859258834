"""Rules that orders must satisfy before they are run: each action is there once, on its worker, in a possible place."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from pipework.schedule.action import NONE, Action
from pipework.schedule.edges import crossings, maker
from pipework.schedule.schedule import Schedule


@dataclass(frozen=True)
class Violation:
    """A reason why a schedule cannot be executed.

    Attributes:
        worker: the worker with the problem.
        action: the action with the problem.
        message: a description, as a sentence.
    """

    worker: int
    action: Action
    message: str


def broken(schedule: Schedule) -> tuple[Violation, ...]:
    """The violations that the orders show without a run.

    Example:
        >>> broken(Schedule("lone", (0,), ((Action("F", 0, 0),),)))[0].message
        '0B0 (or 0I0 and 0W0) is missing in the order of worker 0'
    """
    found = tuple(_misplaced(schedule)) or tuple(_miscounted(schedule))
    # The other rules need each action in its place.
    return found or (*_transfers(schedule), *_of_stages(schedule))


def ascending(schedule: Schedule) -> bool:
    """Whether every stage forms its parameter gradients in the order of micro-batches 0, 1, 2, ...

    Example:
        >>> from pipework.schedule import fill_drain
        >>> ascending(fill_drain(2, 3))
        True
    """
    # B adds to the gradients of all parameters, W to those of split operators, I to the others. So micro-batches must
    # ascend along each of the chains (B, W) and (B, I) of a stage.
    halves = {half: [-1] * schedule.stages for row in schedule.table.values() for half in row.adds}
    chains = {row.letter: [halves[half] for half in row.adds] for row in schedule.table.values() if row.adds}
    for order in schedule.orders:
        for kind, stage, micro_batch, _ in order:
            for latest in chains.get(kind, ()):
                if micro_batch < latest[stage]:
                    return False
                latest[stage] = micro_batch
    return True


def _misplaced(schedule: Schedule) -> Iterator[Violation]:
    for worker, order in enumerate(schedule.orders):
        for action in order:
            home = schedule.placement[action[1]]
            if home != worker:
                where = f"is in the order of worker {worker}, but stage {action.stage} is on worker {home}"
                yield Violation(worker, action, f"{action} {where}")


def _miscounted(schedule: Schedule) -> Iterator[Violation]:
    rows, every = schedule.table.values(), set(range(schedule.micro_batches))
    repeatable = schedule.table.letters(scope="stage", phase="either")
    wanted = [row for row in rows if row.always and not (schedule.inference and row.phase == "backward")]
    always = [(row.letter, row.adds if len(row.adds) > 1 else ()) for row in wanted]
    wholes = {half: kind for kind, halves in always for half in halves}
    paired = [(row.letter, row.partner, wholes.get(row.letter, "")) for row in rows if row.partner]
    for worker, order in enumerate(schedule.orders):
        missing = f"is missing in the order of worker {worker}"
        # The micro-batches of each kind on each stage, and of each transfer: sets of them, for there may be millions.
        found: dict[tuple[str, int, int], list[int]] = defaultdict(list)
        for kind, stage, micro_batch, peer in order:
            found[kind, stage, peer].append(micro_batch)
        for (kind, stage, peer), numbers in found.items():
            if kind in repeatable or len(set(numbers)) == len(numbers):
                continue
            for micro_batch, times in Counter(numbers).items():
                action = Action(kind, stage, micro_batch, peer)
                if times > 1:
                    yield Violation(worker, action, f"{action} occurs {times} times, wanted once")
        for stage in schedule.stages_of(worker):
            of = defaultdict(set, {key[0]: set(numbers) for key, numbers in found.items() if key[1:] == (stage, NONE)})
            for kind, halves in always:
                split = {micro_batch for half in halves for micro_batch in of[half]}
                for micro_batch in sorted((every - of[kind] - split) | (of[kind] & split)):
                    action, *parts = (Action(each, stage, micro_batch) for each in (kind, *halves))
                    if micro_batch in split:
                        half = next(part for part in parts if micro_batch in of[part.kind])
                        why = f"wanted either {kind}, or {' and '.join(halves)}"
                        yield Violation(worker, action, f"worker {worker} has both {action} and {half}: {why}")
                    else:
                        instead = f" (or {' and '.join(map(str, parts))})" if parts else ""
                        yield Violation(worker, action, f"{action}{instead} {missing}")
            for kind, partner, whole in paired:
                for micro_batch in sorted(of[kind] - of[partner] - of[whole]):
                    action, other = Action(partner, stage, micro_batch), Action(kind, stage, micro_batch)
                    yield Violation(worker, action, f"{action} {missing}, which has {other}")


def _transfers(schedule: Schedule) -> Iterator[Violation]:
    """If there are transfers, each value is sent after the action that makes it and received before its use."""
    if not schedule.communicates:
        return
    place = [{action: position for position, action in enumerate(order)} for order in schedule.orders]
    wanted: set[Action] = set()
    for route in crossings(schedule):
        for stage, transfer_of, sends in ((route.source, route.send, True), (route.target, route.receive, False)):
            worker = schedule.placement[stage]
            own = place[worker]
            for micro_batch in range(schedule.micro_batches):
                transfer = transfer_of(micro_batch)
                partner = maker(Action(route.kind, stage, micro_batch), own, schedule.table)
                wanted.add(transfer)
                why = None
                if transfer not in own:
                    why = f"is missing in the order of worker {worker}, which has other transfers"
                elif sends and own[transfer] < own[partner]:
                    why = f"is before {partner}, which makes the value that it sends"
                elif not sends and own[transfer] > own[partner]:
                    why = f"is after {partner}, which needs the value that it receives"
                if why is not None:
                    yield Violation(worker, transfer, f"{transfer} {why}")
    for worker, order in enumerate(schedule.orders):
        for action in order:
            if action.peer >= 0 and action not in wanted:
                why = "is a transfer, but no value goes from one worker to another on that route"
                yield Violation(worker, action, f"{action} {why}")


def _of_stages(schedule: Schedule) -> Iterator[Violation]:
    """A stage's gradient is complete before it is reduced, and its weights are gathered while they are read."""
    found = {(action.kind, action.stage) for order in schedule.orders for action in order if action.micro_batch < 0}
    adding = {row.letter for row in schedule.table.values() if row.adds}
    reading = schedule.table.letters(reads=True)
    for stage, worker in enumerate(schedule.placement if "REDUCE_GRAD" in schedule.kinds else ()):
        if ("REDUCE_GRAD", stage) not in found:
            action = Action("REDUCE_GRAD", stage)
            why = f"is missing in the order of worker {worker}, but other stages have one"
            yield Violation(worker, action, f"{action} {why}")
    for worker, order in enumerate(schedule.orders if found else ()):
        reduced: set[int] = set()
        whole: set[int] = set()
        for action in order:
            kind, stage = action.kind, action.stage
            if kind == "REDUCE_GRAD":
                reduced.add(stage)
            elif kind in ("UNSHARD", "RESHARD"):
                if (stage in whole) == (kind == "UNSHARD"):
                    state = "have been gathered already" if stage in whole else "have not been gathered"
                    yield Violation(worker, action, f"{action} comes when the weights {state}")
                whole = whole | {stage} if kind == "UNSHARD" else whole - {stage}
            if kind in adding and stage in reduced:
                early = Action("REDUCE_GRAD", stage)
                yield Violation(worker, early, f"{early} is before {action}, which adds to the gradient")
            if kind in reading and stage not in whole and ("UNSHARD", stage) in found:
                yield Violation(worker, action, f"{action} needs the weights, but there is no {stage}UNSHARD before it")
