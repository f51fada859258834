"""The search: named schedules and patterns first, then a steady state, then windows, until the budget is spent."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import product
from math import ceil, inf
from random import Random

from pipework_synthesis import solving
from pipework_synthesis.greedy import Keys, Policy, pattern_keys
from pipework_synthesis.incumbent import Budget, Incumbent, Progress
from pipework_synthesis.patterns import offsets_of, random_delays, random_policy
from pipework_synthesis.problem import Orders, Problem
from pipework_synthesis.steady_state import Wanted, pattern
from pipework_synthesis.stretch import Chain, chain_of, fewer, rotated, with_better_block
from pipework_synthesis.times import Times
from pipework_synthesis.window import Window, improved

WHOLE = 400
"""Problems of up to so many operations are given to the solver as a whole."""

_POLICIES = [Policy(*choice) for choice in product((False, True), (0.0, 0.5, 1.0), (False, True), (False, True))]


@dataclass(frozen=True)
class Seed:
    """Orders to begin from, and what they are called."""

    name: str
    orders: Orders


def searched(
    problem: Problem,
    bound: float,
    unit: float,
    seeds: list[Seed],
    budget: Budget,
    *,
    solver: bool,
    progress: Progress | None,
) -> Incumbent:
    """Search for a short plan.

    Args:
        problem: with times in integers.
        bound: no plan is shorter; a lower bound of the makespan.
        unit: one unit of the problem's time in units of the costs, for messages.
        seeds: where to begin.
        budget: how long.
        solver: whether to use OR-tools.
        progress: is told of each better plan.
    """
    best = Incumbent(Times(problem), bound, unit, progress)
    random = Random(0)
    for seed in seeds:
        best.offer(seed.orders, seed.name)
    part = budget.part(0.06 if solver else 0.35)
    _patterns(best, seeds, part, random)
    budget.steps += part.steps
    if solver:
        if problem.operations <= WHOLE:
            part = budget.part(0.25)
            _windows(best, part, random)
            budget.steps += part.steps
            if not best.closed and budget.left > 0.0:
                _whole(best, budget)
        else:
            _steady_state(best, budget)
            _shorter_first(best, seeds, budget)
        _windows(best, budget, random)
    else:
        _neighbours(best, budget, random)
    return best


def _patterns(best: Incumbent, seeds: list[Seed], budget: Budget, random: Random) -> None:
    """Hop-delay patterns, and the seeds as keys, which makes those fit that need too much memory."""
    problem = best.times.problem
    period = problem.work()
    best.try_keys(pattern_keys(problem, offsets_of(problem, [0.0] * 999), period), Policy(), "list scheduling")
    delays_of_best: list[float] | None = None
    shortest = inf
    for seed in seeds:
        if budget.left <= 0.0 or best.closed:
            return
        plan = best.times.plan(seed.orders)
        if plan is not None and not best.times.fits(seed.orders):
            for policy in _POLICIES[::5]:
                best.try_keys(_keys(problem, plan.starts), policy, f"list scheduling in the order of {seed.name}")
    tried = 0
    policy = Policy()
    while budget.left > 0.0 and not best.closed:
        tried += 1
        budget.steps += tried % 20 == 0
        if delays_of_best is None or tried % 3 or tried < 50:
            delays, chosen = random_delays(problem, random), random_policy(random)
        else:  # near the best one
            delays = [max(0.0, delay * random.uniform(0.5, 1.5)) for delay in delays_of_best]
            chosen = policy if random.random() < 0.7 else random_policy(random)
        keys = pattern_keys(problem, offsets_of(problem, delays), period)
        time = best.try_keys(keys, chosen, "hop-delay pattern")
        if time < shortest:
            shortest, delays_of_best, policy = time, delays, chosen


def _keys(problem: Problem, starts: array[float]) -> Keys:
    """Starts of operations as keys of lanes."""
    m = problem.micro_batches
    keys = [starts[lane * m : (lane + 1) * m] for lane in range(len(problem.kinds) * problem.stages)]
    return [*keys, *(array("d", bytes(8 * m)) for _ in range(3 * problem.stages - len(keys)))]


def _whole(best: Incumbent, budget: Budget) -> None:
    """The whole problem as one window, which also gives a bound."""
    if best.plan is None:  # nothing that fits was found to begin from
        return
    amounts = solving.amounts_of(best.times.problem)
    # Without seconds, the units of the solver are about as long.
    seconds = min(30.0, (budget.iterations or 0) * 0.5) if budget.seconds is None else 0.6 * budget.seconds
    found = improved(best.times, best.plan, Window(-1.0, inf), amounts, budget.effort(seconds), compact=False)
    budget.steps += 1
    if found.plan is not None and found.plan.makespan < best.makespan and best.times.fits(found.plan.orders):
        best.take(found.plan, "solver, all at once", improves=True)
    if amounts.exact:
        best.bound = max(best.bound, min(found.bound, best.makespan))


def _steady_state(best: Incumbent, budget: Budget) -> None:
    """Patterns with the smallest periods that the solver finds, unrolled in several ways."""
    problem = best.times.problem
    if len(problem.kinds) * problem.stages > 200:
        return
    amounts = solving.amounts_of(problem)
    part = budget.part(0.1)
    least = ceil(problem.work())
    low, high = least, ceil(least * 1.3)
    seconds = 8.0 if part.seconds is None else max(0.5, part.seconds / 5)
    period = least
    for _ in range(6):  # bisection; the solver's failure counts as proof
        if part.left <= 0.0 or low > high:
            return
        found = pattern(problem, amounts, Wanted(period, 0), part.effort(seconds))
        part.steps += 1
        budget.steps += 1
        if found is None:
            low = period + 1
        else:
            high = period - 1
            keys = pattern_keys(problem, found.offsets, found.period)
            for policy in _POLICIES:
                best.try_keys(keys, policy, "steady state")
        period = (low + high) // 2


def _shorter_first(best: Incumbent, seeds: list[Seed], budget: Budget) -> None:
    """If there are many micro-batches, first a problem with few, of which a block in the middle is then repeated."""
    problem = best.times.problem
    few = 2 * problem.workers
    if problem.micro_batches < 1.5 * few or few * len(problem.kinds) * problem.stages > 4000:
        return
    short = fewer(problem, few)
    cut = [Seed(seed.name, _first_micro_batches(problem, seed.orders, few)) for seed in seeds]
    part = budget.part(0.5)
    inner = Incumbent(Times(short), 0.0, 1.0, None)
    random = Random(0)
    for seed in cut:
        inner.offer(seed.orders, seed.name)
    _patterns(inner, cut, part.part(0.1), random)
    _windows(inner, part, random)
    budget.steps += part.steps
    if inner.plan is not None:
        _blocks(best, _chains(best, inner), budget, random)


def _chains(best: Incumbent, inner: Incumbent) -> list[tuple[float, Chain]]:
    """The best ways to stretch a plan for few micro-batches, the best first."""
    short, plan, times = inner.times.problem, inner.plan, _rating(best.times.problem)
    assert plan is not None
    starts = sorted(plan.starts)
    found: list[tuple[float, Chain]] = []
    for cut in sorted({starts[len(starts) * number // 48] for number in range(8, 40)}):
        for size in range(1, short.micro_batches // 2 + 1):
            chain = chain_of(short, plan, cut, size)
            if chain is None:
                break
            makespan = _long(times, chain)
            if makespan < inf:
                found.append((makespan, chain))
    found.sort(key=lambda each: each[0])
    for _, chain in found[:3]:
        words = f"{chain.size} of {short.micro_batches} micro-batches, repeated"
        best.offer(chain.orders(best.times.problem.micro_batches), words)
    return found


def _long(times: Times, chain: Chain) -> float:
    """The makespan of a chain with many blocks; infinity if it does not fit."""
    orders = chain.orders(times.problem.micro_batches)
    plan = times.plan(orders)
    return plan.makespan if plan is not None and times.fits(orders) else inf


def _rating(problem: Problem) -> Times:
    """The times by which chains are compared: of enough micro-batches that the blocks decide, but not of all."""
    few = 8 * problem.workers
    return Times(fewer(problem, few) if problem.micro_batches > few else problem)


def _blocks(best: Incumbent, chains: list[tuple[float, Chain]], budget: Budget, random: Random) -> None:
    """The blocks of some chains, each scheduled anew again and again."""
    problem = best.times.problem
    part = budget.part(0.5)
    times = _rating(problem)
    pool = [each for size in range(1, 5) for each in [one for one in chains if one[1].size == size][:2]]
    while pool and part.left > 0.0 and not best.closed:
        pool.sort(key=lambda each: each[0])
        position = min(random.randrange(len(pool)), random.randrange(len(pool)))
        makespan, chain = pool[position]
        part.steps += 1
        budget.steps += 1
        if random.random() < 0.5 and chain.few + 5 * chain.size < problem.micro_batches:
            many = chain.few + 3 * chain.size
            plan = Times(fewer(problem, many)).plan(chain.orders(many))
            if plan is not None:
                turned = rotated(chain, plan, many, random.random())
                if turned.few <= 4 * problem.workers:
                    chain = turned
        better = with_better_block(problem, chain, part.effort(1.5 * chain.size, part.steps))
        if better is None:
            continue
        length = _long(times, better)
        if length < makespan:
            orders = better.orders(problem.micro_batches)
            best.offer(orders, f"a block of {chain.size} micro-batches, repeated")
        if length <= makespan:
            pool[position] = length, better


def _first_micro_batches(problem: Problem, orders: Orders, few: int) -> Orders:
    m = problem.micro_batches
    return [[operation // m * few + operation % m for operation in order if operation % m < few] for order in orders]


def _windows(best: Incumbent, budget: Budget, random: Random) -> None:
    """Windows here and there, larger ones when small ones help no more."""
    if best.plan is None:
        return
    problem = best.times.problem
    amounts = solving.amounts_of(problem)
    density = problem.operations / best.plan.makespan if best.plan.makespan else 1.0
    wanted = 120.0
    ramp = problem.workers * problem.work()
    while budget.left > 0.0 and not best.closed:
        length = max(1.0, wanted * random.uniform(0.6, 1.5) / density)
        end = best.makespan
        where = random.random()
        if ramp * 3 < end and where < 0.6:
            center = random.uniform(0.0, ramp) if where < 0.3 else end - random.uniform(0.0, ramp)
        else:
            center = random.uniform(0.0, end)
        effort = budget.effort(min(4.0, wanted / 50.0), budget.steps)
        window = Window(center - length / 2, center + length / 2)
        found = improved(best.times, best.plan, window, amounts, effort)
        budget.steps += 1
        if found.plan is None:
            wanted = max(40.0, wanted * 0.95)
            continue
        if found.plan.makespan > best.makespan or not best.times.fits(found.plan.orders):
            continue  # rounded memory
        gained = found.plan.makespan < best.makespan
        best.take(found.plan, "window search", improves=True)
        if found.optimal and not gained:
            wanted = min(600.0, wanted * 1.03)
        elif not found.optimal and not gained:
            wanted = max(40.0, wanted * 0.97)


def _neighbours(best: Incumbent, budget: Budget, random: Random) -> None:
    """Without a solver: list schedules with the best plan's starts as keys, some of them changed."""
    if best.plan is None:
        return
    problem = best.times.problem
    unit = problem.work() / len(problem.kinds)
    base = best.plan
    lanes = range(len(problem.kinds) * problem.stages)
    tried = 0
    while budget.left > 0.0 and not best.closed:
        tried += 1
        budget.steps += tried % 20 == 0
        keys = _keys(problem, base.starts)
        amount = unit * random.choice((0.3, 1.0, 3.0))
        first = random.randrange(problem.micro_batches)
        some = range(first, min(problem.micro_batches, first + random.randrange(1, 1 + problem.micro_batches)))
        for lane in random.sample(lanes, k=min(len(lanes), random.randrange(1, 4))):
            change = random.uniform(-amount, amount)
            for micro_batch in some:
                keys[lane][micro_batch] += change
        best.try_keys(keys, _POLICIES[random.randrange(len(_POLICIES))], "changed keys", improves=True)
        base = best.plan
