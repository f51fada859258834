"""Rules that orders must satisfy before they are run: each action is there once, on its worker, in a possible place."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from pipework.schedule.action import NONE, Action
from pipework.schedule.edges import crossings
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
    return found or (*_transfers(schedule), *_reductions(schedule), *_shards(schedule))


def ascending(schedule: Schedule) -> bool:
    """Whether every stage forms its parameter gradients in the order of micro-batches 0, 1, 2, ...

    Example:
        >>> from pipework.schedule import fill_drain
        >>> ascending(fill_drain(2, 3))
        True
    """
    # B adds to the gradients of all parameters, W to those of split operators, I to the others. So micro-batches must
    # ascend along each of the chains (B, W) and (B, I) of a stage.
    of_inputs, of_weights = ([-1] * schedule.stages for _ in range(2))
    chains = {"B": (of_inputs, of_weights), "I": (of_inputs,), "W": (of_weights,)}
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
    every = set(range(schedule.micro_batches))
    for worker, order in enumerate(schedule.orders):
        missing = f"is missing in the order of worker {worker}"
        # The micro-batches of each kind on each stage, and of each transfer: sets of them, for there may be millions.
        found: dict[tuple[str, int, int], list[int]] = defaultdict(list)
        for kind, stage, micro_batch, peer in order:
            found[kind, stage, peer].append(micro_batch)
        for (kind, stage, peer), numbers in found.items():
            if kind in ("UNSHARD", "RESHARD") or len(set(numbers)) == len(numbers):
                continue
            for micro_batch, times in Counter(numbers).items():
                action = Action(kind, stage, micro_batch, peer)
                if times > 1:
                    yield Violation(worker, action, f"{action} occurs {times} times, wanted once")
        for stage in schedule.stages_of(worker):
            forward, full, inputs, weights = (set(found[kind, stage, NONE]) for kind in "FBIW")
            for micro_batch in sorted(every - forward):
                action = Action("F", stage, micro_batch)
                yield Violation(worker, action, f"{action} {missing}")
            whole_or_split = (full - inputs - weights) | ((inputs & weights) - full)
            for micro_batch in () if schedule.inference else sorted(every - whole_or_split):
                b, i, w = (Action(kind, stage, micro_batch) for kind in "BIW")
                if micro_batch in full:
                    half = i if micro_batch in inputs else w
                    yield Violation(worker, b, f"worker {worker} has both {b} and {half}: wanted either B, or I and W")
                elif micro_batch in inputs ^ weights:
                    lone, other = (w, i) if micro_batch in inputs else (i, w)
                    yield Violation(worker, lone, f"{lone} {missing}, which has {other}")
                else:
                    yield Violation(worker, b, f"{b} (or {i} and {w}) {missing}")


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
                transfer, partner = transfer_of(micro_batch), Action(route.kind, stage, micro_batch)
                partner = partner if partner in own else Action("I", stage, micro_batch)
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


def _reductions(schedule: Schedule) -> Iterator[Violation]:
    if "REDUCE_GRAD" not in schedule.kinds:
        return
    reducing = [action.stage for order in schedule.orders for action in order if action.kind == "REDUCE_GRAD"]
    for stage in sorted(set(range(schedule.stages)) - set(reducing)):
        worker, action = schedule.placement[stage], Action("REDUCE_GRAD", stage)
        yield Violation(
            worker, action, f"{action} is missing in the order of worker {worker}, but other stages have one"
        )
    for worker, order in enumerate(schedule.orders):
        done: set[int] = set()
        for action in order:
            if action.kind == "REDUCE_GRAD":
                done.add(action.stage)
            elif action.kind in ("B", "I", "W") and action.stage in done:
                early = Action("REDUCE_GRAD", action.stage)
                yield Violation(worker, early, f"{early} is before {action}, which adds to the gradient")


def _shards(schedule: Schedule) -> Iterator[Violation]:
    """If a stage's weights are gathered, it computes only between ``UNSHARD`` and ``RESHARD``."""
    if schedule.kinds.isdisjoint(("UNSHARD", "RESHARD")):
        return
    sharded = {action.stage for order in schedule.orders for action in order if action.kind == "UNSHARD"}
    for worker, order in enumerate(schedule.orders):
        whole: set[int] = set()
        for action in order:
            kind, stage = action.kind, action.stage
            if kind == "UNSHARD":
                if stage in whole:
                    yield Violation(worker, action, f"{action} comes when the weights have been gathered already")
                whole.add(stage)
            elif kind == "RESHARD":
                if stage not in whole:
                    yield Violation(worker, action, f"{action} comes when the weights have not been gathered")
                whole.discard(stage)
            elif kind in ("F", "B", "I", "R") and stage in sharded and stage not in whole:
                yield Violation(worker, action, f"{action} needs the weights, but there is no {stage}UNSHARD before it")
