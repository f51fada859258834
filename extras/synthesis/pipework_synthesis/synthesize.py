"""Synthesis of a schedule for given costs and memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from math import inf
from operator import itemgetter
from types import MappingProxyType

from pipework.schedule import (
    Costs,
    Schedule,
    ScheduleError,
    Simulation,
    StageCosts,
    lower_bound,
    simulate,
    with_recompute,
)
from pipework_synthesis import solving
from pipework_synthesis.incumbent import Budget
from pipework_synthesis.named import named_schedules
from pipework_synthesis.problem import (
    SLACK,
    Problem,
    in_integers,
    least_room,
    orders_of,
    problem_of,
    schedule_of,
)
from pipework_synthesis.result import Synthesis
from pipework_synthesis.search import Seed, searched

_SECONDS = 10.0
_MOST_ACTIONS = 4_000_000  # of all schedules to begin from; each action takes more than a hundred bytes


def synthesize(
    placement: Sequence[int],
    micro_batches: int,
    costs: Costs | None = None,
    *,
    memory_limit: float | Sequence[float] | None = None,
    split: bool = True,
    recomputed: Sequence[int | Collection[int]] = (),
    seconds: float | None = None,
    iterations: int | None = None,
    seeds: Iterable[Schedule] = (),
    named: bool = True,
    solver: bool | None = None,
    progress: Callable[[str], None] | None = None,
) -> Synthesis:
    """Search for the fastest schedule for given costs, within a limit of memory.

    The search begins with all named schedules of this placement that fit the limit, unless `named` leaves them out, so
    the result is never slower than any of them. Then it tries hop-delay patterns with list scheduling, steady states,
    and windows of the best schedule that a solver schedules anew. It can be stopped at any time by its budget; more
    time finds more.

    Args:
        placement: the worker of each stage.
        micro_batches: number of micro-batches.
        costs: of each stage, not of workers' shares; see :meth:`Costs.placed`. Unit costs if None.
        memory_limit: the most memory that a worker's activations may hold, or a number for each worker, counted as in
            :func:`simulate`; None: no limit.
        split: whether backwards may be split into ``I`` and ``W``.
        recomputed: for each stage, which micro-batches it recomputes, or how many of the first ones. There is no
            recomputation where the backward follows the forward at once, as in :func:`with_recompute`.
        seconds: how long to search; 10 if neither this nor `iterations` is given. Simulating named schedules of many
            operations may take longer.
        iterations: how many steps to search, a step being a window of the solver or 20 list schedules. The result is
            the same each time if `seconds` is None.
        seeds: more schedules to begin from; those that do not fit the limit or the problem are left out.
        named: whether to begin with all schedules that have a name, too. Without, the result may be slower than one of
            them; a few hundred workers with as many micro-batches take minutes to simulate them all.
        solver: whether to use OR-tools, which the extra ``pipework[plan]`` brings; None: if it is installed.
        progress: is called with a line of text for each better schedule.

    Raises:
        TypeError: a number, schedule or the costs have a wrong type.
        ValueError: a number is out of range, or a sequence has another length.
        ScheduleError: a limit is too small for one micro-batch, or no schedule within it was found.
        ModuleNotFoundError: `solver` is True, and OR-tools is not installed.

    Example:
        >>> from pipework.schedule import wave_placement
        >>> costs = Costs(forward=0.5, input_gradient=0.75, weight_gradient=0.25)
        >>> found = synthesize(wave_placement(2, 2), 4, costs, memory_limit=4, iterations=5, solver=False)
        >>> found.makespan <= min(found.named.values())
        True
    """
    task = _Task(placement, micro_batches, costs, memory_limit, recomputed, split=split)
    use = _solver(solver)
    budget = _budget(seconds, iterations)
    more = list(seeds)
    for seed in more:
        if not isinstance(seed, Schedule):
            raise TypeError(f"seeds has {seed!r}: wanted a Schedule, such as build('1f1b', workers=4, chunks=8)")
    makespans: dict[str, float] = {}
    best: Simulation | None = None
    found_by = ""
    bound = task.bound
    candidates = _ToBeginFrom()
    for schedule in task.candidates(more, named=named):
        simulation = task.simulated(schedule)
        candidates.add(schedule, inf if simulation is None else simulation.makespan)
        if simulation is None:
            continue
        makespans[schedule.name] = min(simulation.makespan, makespans.get(schedule.name, inf))
        if best is None or simulation.makespan < best.makespan:
            best, found_by = simulation, f"named schedule {schedule.name!r}"
    problems = task.problems()
    for number, problem in enumerate(problems):
        whole, scale, exact = in_integers(problem)
        starts = [
            Seed(schedule.name, orders)
            for schedule in candidates.schedules
            if (orders := orders_of(whole, schedule)) is not None
        ]
        part = budget.part(1.0 / (len(problems) - number))
        goal = bound * scale * (1 - 1e-9) if exact else 0.0
        incumbent = searched(whole, goal, 1 / scale, starts, part, solver=use, progress=progress)
        budget.steps += part.steps
        if incumbent.plan is not None:
            simulation = task.simulated(schedule_of(problem, incumbent.plan.orders))
            if simulation is not None and (best is None or simulation.makespan < best.makespan * (1 - 1e-12)):
                best, found_by = simulation, incumbent.found_by
        if exact and len(problems) == 1 and not any(task.recomputed):
            bound = max(bound, incumbent.bound / scale)
    if best is None:
        raise ScheduleError("no schedule was found within memory_limit: raise it, or give a schedule in seeds")
    result = replace(best.schedule, name="synthesised")
    return Synthesis(
        result,
        replace(best, schedule=result),
        min(bound, best.makespan),
        found_by,
        MappingProxyType(makespans),
        budget.elapsed,
        use,
        budget.steps,
    )


def _micro_batches(stage: int, recomputed: object, count: int) -> frozenset[int]:
    """What a stage recomputes, given as a number of first micro-batches, or as their numbers."""
    chosen = recomputed
    if type(recomputed) is int and 0 <= recomputed <= count:
        chosen = range(recomputed)
    if not isinstance(chosen, Collection) or not all(type(each) is int and 0 <= each < count for each in chosen):
        raise ValueError(
            f"recomputed of stage {stage} is {recomputed!r}: wanted how many of the first micro-batches, an integer "
            f"from 0 to {count}, or a collection of some of the micro-batches 0 to {count - 1}"
        )
    return frozenset(chosen)


def _solver(wanted: bool | None) -> bool:
    if wanted and not solving.available():
        raise ModuleNotFoundError(
            "solver=True needs OR-tools, which is not installed: pip install ortools, or leave solver out"
        )
    return solving.available() if wanted is None else wanted


def _budget(seconds: float | None, iterations: int | None) -> Budget:
    if iterations is not None and (type(iterations) is not int or iterations < 1):
        raise ValueError(f"iterations is {iterations!r}: wanted an integer of at least 1")
    if seconds is not None:
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise TypeError(f"seconds is {seconds!r}: wanted a number, or None")
        if not 0 < seconds < inf:
            raise ValueError(f"seconds is {seconds!r}: wanted a positive number that is not infinite")
    return Budget(_SECONDS if seconds is None and iterations is None else seconds, iterations)


class _ToBeginFrom:
    """Schedules to begin from, in the order in which they came; of large ones the fastest, for they take gigabytes.

    Those that do not fit, whose makespan is infinite, are there, too: their order may help.
    """

    def __init__(self) -> None:
        self._found: list[tuple[float, Schedule]] = []
        self._actions = 0

    @property
    def schedules(self) -> list[Schedule]:
        return [schedule for _, schedule in self._found]

    def add(self, schedule: Schedule, makespan: float) -> None:
        self._found.append((makespan, schedule))
        self._actions += _actions(schedule)
        while self._actions > _MOST_ACTIONS and len(self._found) > 1:
            slowest = max(self._found, key=itemgetter(0))
            self._found.remove(slowest)
            self._actions -= _actions(slowest[1])


def _actions(schedule: Schedule) -> int:
    return sum(map(len, schedule.orders))


class _Task:
    """The checked arguments."""

    def __init__(
        self,
        placement: Sequence[int],
        micro_batches: int,
        costs: Costs | None,
        memory_limit: float | Sequence[float] | None,
        recomputed: Sequence[int | Collection[int]],
        *,
        split: bool,
    ) -> None:
        # Refuses a wrong placement, number of micro-batches, costs or limit.
        lower_bound(placement, micro_batches, costs, memory_limit=memory_limit)
        self.placement = tuple(placement)
        self.micro_batches, self.split = micro_batches, split
        self.costs = replace(costs or Costs(), skip_transfer=0.0)  # what is searched for has no skip connections
        stages = len(self.placement)
        self.spread: StageCosts = self.costs.spread(stages)
        if isinstance(recomputed, Set | Mapping):
            raise TypeError(f"recomputed is {recomputed!r}: wanted a sequence with an entry for each stage")
        entries = tuple(recomputed) or (0,) * stages
        if len(entries) != stages:
            raise ValueError(f"recomputed has {len(entries)} entries: wanted {stages}, one for each stage")
        self.recomputed: tuple[frozenset[int], ...] = tuple(
            _micro_batches(stage, each, micro_batches) for stage, each in enumerate(entries)
        )
        workers = 1 + max(self.placement)
        if memory_limit is None or isinstance(memory_limit, int | float):
            self.limits = (inf if memory_limit is None else float(memory_limit),) * workers
        else:
            self.limits = tuple(map(float, memory_limit))
        self.bound = self._bound()
        self._check_room()

    def _bound(self) -> float:
        """The bound of all schedules."""
        # A stage need not recompute what it waits for; then it does nothing else meanwhile, until the gradient is back.
        spread, stages = self.spread, len(self.placement)
        back = [0.0] * stages
        step = [min(spread["input_gradient"][s], spread["backward"][s]) for s in range(stages)]
        for s in range(stages - 2, -1, -1):
            hop = 0.0 if self.placement[s] == self.placement[s + 1] else 2 * spread["transfer"][s]
            back[s] = back[s + 1] + hop + spread["forward"][s + 1] + step[s + 1]
        again = [min(time, wait) for time, wait in zip(spread["recompute"], back, strict=True)]
        return lower_bound(
            self.placement,
            self.micro_batches,
            replace(self.costs, recompute=again),
            memory_limit=self.limits,
            split=self.split,
            recomputed=[len(each) for each in self.recomputed],
        )

    def _check_room(self) -> None:
        """Refuse a limit that is too small for one micro-batch, with the gradients that wait for weight halves."""
        rooms = [least_room(problem) for problem in self.problems()]
        for worker, limit in enumerate(self.limits):
            needed = min(room[worker] for room in rooms)
            if needed > limit * SLACK:
                raise ScheduleError(
                    f"memory_limit of worker {worker} is {limit:g}, but one micro-batch holds {needed:g} there, so no "
                    f"schedule exists: raise the limit to {needed:g}, or place fewer stages on the worker"
                )

    def problems(self) -> list[Problem]:
        """The problem; and where a whole backward is better than its halves, that with whole ones."""
        spread = self.spread
        whole_is_shorter = any(
            both < (one + other) * (1 - 1e-9)
            for both, one, other in zip(
                spread["backward"], spread["input_gradient"], spread["weight_gradient"], strict=True
            )
        )
        waits_larger = any(late > early for late, early in zip(spread["waiting"], spread["activation"], strict=True))
        kinds = [True] if self.split else []
        if not self.split or whole_is_shorter or waits_larger:
            kinds.append(False)
        return [
            problem_of(self.placement, self.micro_batches, self.spread, self.limits, self.recomputed, split=each)
            for each in kinds
        ]

    def candidates(self, more: Iterable[Schedule], *, named: bool) -> Iterator[Schedule]:
        """Named and given schedules for this problem."""
        untimed = 3 * len(self.placement) * self.micro_batches < 20_000
        if named:
            for schedule in named_schedules(self.placement, self.micro_batches, self.costs, also_untimed=untimed):
                yield self._recomputing(schedule)
        for schedule in more:
            same = schedule.placement == self.placement and schedule.micro_batches == self.micro_batches
            if same and not schedule.inference and not schedule.communicates:
                yield self._recomputing(schedule)

    def _recomputing(self, schedule: Schedule) -> Schedule:
        """The schedule with the wanted recomputation; one that has some of its own stays."""
        if "R" in schedule.kinds:
            return schedule
        return with_recompute(schedule, self.recomputed)

    def simulated(self, schedule: Schedule) -> Simulation | None:
        """The simulation of a schedule; None if it does not fit, or splits what is to be whole."""
        if schedule.split_stages and not self.split:
            return None
        try:
            return simulate(schedule, self.costs, memory_limit=self.limits)
        except ScheduleError:
            return None
