"""Rules that orders must satisfy before they are run: each action is there once, on its worker, in a possible place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pipework.schedule.action import KINDS, Action
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
    found = () if _complete(schedule) else (*_misplaced(schedule), *_miscounted(schedule))
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


def _complete(schedule: Schedule) -> bool:
    """Whether all computations are there once, on their workers: a fast check of the usual case."""
    whole: Counter[Action] = Counter()
    for worker, order in enumerate(schedule.orders):
        # The micro-batches of each kind on each of the worker's own stages.
        found: dict[str, dict[int, list[int]]] = {
            kind: {stage: [] for stage in schedule.stages_of(worker)} for kind in KINDS
        }
        add = {kind: {stage: row.append for stage, row in rows.items()} for kind, rows in found.items()}
        for action in order:
            kind, stage, micro_batch, peer = action
            if schedule.placement[stage] != worker:
                return False
            if micro_batch < 0 or peer >= 0:
                whole[action] += kind not in ("UNSHARD", "RESHARD")
            else:
                add[kind][stage](micro_batch)
        for stage in found["F"]:
            each = {kind: found[kind][stage] for kind in KINDS}
            if not _stage_is_complete(each, schedule.micro_batches, inference=schedule.inference):
                return False
    return all(number <= 1 for number in whole.values())


def _stage_is_complete(found: Mapping[str, list[int]], count: int, *, inference: bool) -> bool:
    """Whether a stage has each computation once, from the micro-batches of each kind."""
    forward, full, inputs, weights, recompute = (set(found[kind]) for kind in KINDS)
    if sum(map(len, (forward, full, inputs, weights, recompute))) < sum(map(len, found.values())):
        return False  # something is there twice
    both = 0 if inference else count
    return len(forward) == count and inputs == weights and len(full) + len(inputs) == both == len(full | inputs)


def _misplaced(schedule: Schedule) -> Iterator[Violation]:
    for worker, order in enumerate(schedule.orders):
        for action in order:
            home = schedule.placement[action.stage]
            if home != worker:
                where = f"is in the order of worker {worker}, but stage {action.stage} is on worker {home}"
                yield Violation(worker, action, f"{action} {where}")


def _miscounted(schedule: Schedule) -> Iterator[Violation]:
    count = Counter(action for order in schedule.orders for action in order)
    for worker, order in enumerate(schedule.orders):
        for action in dict.fromkeys(order):
            if count[action] > 1 and action.kind not in ("UNSHARD", "RESHARD"):
                yield Violation(worker, action, f"{action} occurs {count[action]} times, wanted once")
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
                both = f"worker {worker} has both {full} and {halves[0]}: wanted either B, or I and W"
                yield Violation(worker, full, both)
            elif not count[full] and not halves:
                yield Violation(worker, full, f"{full} (or {inputs} and {weights}) {missing}")
            elif len(halves) == 1:
                lone = weights if halves == [inputs] else inputs
                yield Violation(worker, lone, f"{lone} {missing}, which has {halves[0]}")


def _transfers(schedule: Schedule) -> Iterator[Violation]:
    """If there are transfers, each value is sent after the action that makes it and received before its use."""
    if not schedule.communicates:
        return
    place = [{action: position for position, action in enumerate(order)} for order in schedule.orders]
    wanted: set[Action] = set()
    for route in crossings(schedule):
        for stage, transfers in ((route.source, route.send), (route.target, route.receive)):
            worker = schedule.placement[stage]
            for micro_batch in range(schedule.micro_batches):
                transfer = transfers(micro_batch)
                wanted.add(transfer)
                partner = Action(route.kind, stage, micro_batch)
                partner = partner if partner in place[worker] else Action("I", stage, micro_batch)
                yield from _misordered(worker, place[worker], transfer, partner)
    for worker, order in enumerate(schedule.orders):
        for action in order:
            if action.peer >= 0 and action not in wanted:
                why = "no value goes from one worker to another on that route"
                yield Violation(worker, action, f"{action} is a transfer, but {why}")


def _misordered(worker: int, place: dict[Action, int], transfer: Action, partner: Action) -> Iterator[Violation]:
    at = place.get(transfer)
    if at is None:
        why = f"{transfer} is missing in the order of worker {worker}, which has other transfers"
        yield Violation(worker, transfer, why)
    elif transfer.kind.startswith("SEND") and at < place[partner]:
        yield Violation(worker, transfer, f"{transfer} is before {partner}, which makes the value that it sends")
    elif transfer.kind.startswith("RECV") and at > place[partner]:
        yield Violation(worker, transfer, f"{transfer} is after {partner}, which needs the value that it receives")


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
