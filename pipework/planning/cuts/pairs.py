"""Exact search for V placement: all states after each worker, not only a staircase of them.

It knows that stages are not empty, and boundaries may add any number at any place. It starts from a cut that is known,
and leaves out what cannot be better: states whose layers are too many for the workers still to come. With a good cut,
which leaves workers little idle time, few states stay.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from pipework.planning.cuts.bisection import WEIGHT
from pipework.planning.cuts.bounds import Shares
from pipework.planning.cuts.tables import Places, Tables

State = tuple[int, int]  # what is left: from this place to that one
Loads = tuple[int, ...]  # weighted, largest first


class TooManyError(Exception):
    """The search has looked at as many steps as it may."""


@dataclass
class Pairs:
    """An exact search.

    Attributes:
        tables: the problem.
        shares: its work.
        weights: the factor of each worker's load, in thousandths.
        fairest: whether the second-largest load is minimal, too, then the third, and so on.
        steps: how many steps it may look at; a step adds a worker to a state.
    """

    tables: Tables
    shares: Shares
    weights: Sequence[int]
    fairest: bool
    steps: int

    def best(self, caps: Sequence[int]) -> Places | None:
        """The best cut within the caps; None if there is none.

        Raises:
            TooManyError: there are too many states.
        """
        tables = self.tables
        left = self.shares.left(caps)
        states: dict[State, Loads] = {(0, tables.places): ()}
        came: list[dict[State, State]] = []
        for worker, cap in enumerate(caps):
            states, before = self._step(worker, cap, states, left[worker + 1])
            came.append(before)
            if not states:
                return None
        state = min(states, key=lambda each: states[each])
        cut = [state[0]]
        for before in reversed(came):
            state = before[state]
            cut = [state[0], *cut, state[1]]
        return cut

    def _step(
        self, worker: int, cap: int, states: dict[State, Loads], most: float
    ) -> tuple[dict[State, Loads], dict[State, State]]:
        """The states after a worker, and the state that each came from."""
        tables, work, weight = self.tables, self.shares.work, self.weights[worker]
        mirrored = len(tables.sums) - 1 - worker
        kept = 2 * (len(self.weights) - 1 - worker)
        head, head_begins, head_ends = tables.sums[worker], tables.begins[worker], tables.ends[worker]
        tail, tail_begins, tail_ends = tables.sums[mirrored], tables.begins[mirrored], tables.ends[mirrored]
        head_memory, tail_memory, limit = tables.memory[worker], tables.memory[mirrored], tables.limits[worker]
        best: dict[State, Loads] = {}
        before: dict[State, State] = {}
        for state, loads in states.items():
            front, back = state
            for new in range(front + 1, back - kept):
                if head[new] - head[front] > cap:
                    break
                room = cap - (head_ends[new] - head_begins[front])
                size = limit - (head_memory[new] - head_memory[front])
                first = min(back - 1, bisect_right(work, most + work[new]) - 1) if kept else new
                for start in range(first, new + kept - 1, -1):
                    self.steps -= 1
                    if tail[back] - tail[start] > room or tail_memory[back] - tail_memory[start] > size:
                        break
                    more = tail_ends[back] - tail_begins[start]
                    if more <= room:
                        load = (cap - room + more) * weight // WEIGHT
                        longer = self._with(loads, load)
                        place = (new, start)
                        if place not in best or longer < best[place]:
                            best[place], before[place] = longer, state
            if self.steps < 0:
                raise TooManyError
        return best, before

    def _with(self, loads: Loads, load: int) -> Loads:
        if self.fairest:
            return tuple(sorted((*loads, load), reverse=True))
        return (max(loads[0], load) if loads else load,)
