"""From a schedule of few micro-batches to one of many: a block in the middle repeats.

::

    few      before | after                      the cut is a moment in the middle
    many     before | block | block | after      a block has the first operations after the cut in each lane

At the end of a block each lane is as far as at its beginning, but some micro-batches later; so another block, or the
rest, can follow. The orders run, since those for few do; whether they fit the limits is to be checked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipework.schedule import spread_evenly
from pipework_synthesis.problem import Orders, Problem
from pipework_synthesis.solving import SolverEffort, amounts_of
from pipework_synthesis.times import TimedOrders, Times
from pipework_synthesis.window import WindowCut, improved_between


def fewer(problem: Problem, few: int) -> Problem:
    """The problem with fewer micro-batches, of which as large a share is recomputed."""
    m = problem.micro_batches
    shares = [spread_evenly(round(few * sum(again) / m), few) for again in problem.again]
    return replace(problem, micro_batches=few, again=tuple(bytes(i in share for i in range(few)) for share in shares))


@dataclass(frozen=True)
class Chain:
    """A block that repeats, what is before it, and what is after it.

    Operations are pairs of lane and micro-batch; those of the block are of its first turn, and those after it have
    the micro-batches of a schedule without any block.

    Attributes:
        few: number of micro-batches without any block.
        size: how many operations of each lane a block has.
        before, block, after: for each worker.
        done: how many operations of each lane are before the block.
    """

    few: int
    size: int
    before: list[list[tuple[int, int]]]
    block: list[list[tuple[int, int]]]
    after: list[list[tuple[int, int]]]
    done: dict[int, int]

    def orders(self, many: int) -> Orders:
        """The orders for many micro-batches; a part of a block comes first if whole ones do not fill them."""
        more = many - self.few
        turns, remainder = divmod(more, self.size)
        result: Orders = []
        for before, block, after in zip(self.before, self.block, self.after, strict=True):
            own = [lane * many + micro_batch for lane, micro_batch in before]
            if remainder:
                part = (each for each in block if each[1] < self.done[each[0]] + remainder)
                own += [lane * many + micro_batch for lane, micro_batch in part]
            for turn in range(turns):
                shift = remainder + turn * self.size
                own += [lane * many + micro_batch + shift for lane, micro_batch in block]
            own += [lane * many + micro_batch + more for lane, micro_batch in after]
            result.append(own)
        return result


def chain_of(short: Problem, plan: TimedOrders, cut: float, size: int) -> Chain | None:
    """The chain with a cut at a moment of a plan; None if a lane has not enough operations left for a block.

    Example:
        >>> from pipework.schedule import Costs
        >>> from pipework_synthesis.problem import problem_of
        >>> short = problem_of((0,), 2, Costs().spread(1), (1,), [()], split=False)
        >>> chain = chain_of(short, Times(short).plan([[0, 2, 1, 3]]), cut=3.0, size=1)
        >>> chain.before, chain.block, chain.orders(4)
        ([[(0, 0), (1, 0)]], [[(0, 1), (1, 1)]], [[0, 4, 1, 5, 2, 6, 3, 7]])
    """
    few = short.micro_batches
    done = dict.fromkeys(range(len(short.kinds) * short.stages), 0)
    before, rest = [], []
    for order in plan.orders:
        first = next((k for k, operation in enumerate(order) if plan.starts[operation] >= cut), len(order))
        pairs = [divmod(operation, few) for operation in order]
        before.append(pairs[:first])
        rest.append(pairs[first:])
        for lane, _ in pairs[:first]:
            done[lane] += 1
    if max(done.values()) + size > few:
        return None
    block = [[(lane, i) for lane, i in own if i < done[lane] + size] for own in rest]
    return Chain(few, size, before, block, rest, done)


def with_better_block(problem: Problem, chain: Chain, effort: SolverEffort) -> Chain | None:
    """Let the solver schedule a block anew, between two others.

    Args:
        problem: any number of its micro-batches.
        chain: whose block it is.
        effort: how long the solver may search.

    Returns:
        The chain with the new block, which need not be better when it repeats; None if the solver found nothing.
    """
    many = chain.few + 3 * chain.size
    times = Times(fewer(problem, many))
    orders = chain.orders(many)
    plan = times.plan(orders)
    if plan is None or not times.fits(orders):
        return None
    ends = [(len(before) + len(block), len(block)) for before, block in zip(chain.before, chain.block, strict=True)]
    cut = WindowCut(
        [order[:end] for order, (end, _) in zip(orders, ends, strict=True)],
        [order[end : end + length] for order, (end, length) in zip(orders, ends, strict=True)],
        [order[end + length :] for order, (end, length) in zip(orders, ends, strict=True)],
    )
    found = improved_between(times, plan, cut, amounts_of(times.problem), effort)
    if found.plan is None:
        return None
    block = [
        [(operation // many, operation % many - chain.size) for operation in order[end : end + length]]
        for order, (end, length) in zip(found.plan.orders, ends, strict=True)
    ]
    return replace(chain, block=block)


def rotated(chain: Chain, plan: TimedOrders, many: int, share: float) -> Chain:
    """The chain with its cut at a later moment of its first block.

    Args:
        chain: any.
        plan: of its orders for `many` micro-batches.
        many: a number with whole blocks only.
        share: of the time of a block, from 0 to 1.
    """
    starts = plan.starts
    firsts = [starts[own[0][0] * many + own[0][1]] for own in chain.block if own]
    lasts = [starts[own[0][0] * many + own[0][1] + chain.size] for own in chain.block if own]
    moment = min(firsts) + share * (min(lasts) - min(firsts))
    before, block, after = [], [], []
    done = dict(chain.done)
    for own_before, own, own_after in zip(chain.before, chain.block, chain.after, strict=True):
        first = next((k for k, (lane, i) in enumerate(own) if starts[lane * many + i] >= moment), len(own))
        before.append(own_before + own[:first])
        block.append(own[first:] + [(lane, i + chain.size) for lane, i in own[:first]])
        after.append(own[first:] + [(lane, i + chain.size) for lane, i in own_after])
        for lane, _ in own[:first]:
            done[lane] += 1
    return Chain(chain.few + chain.size, chain.size, before, block, after, done)
