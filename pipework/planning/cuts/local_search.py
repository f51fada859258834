"""Improves a cut for any placement, by moves that a stage's layer makes to another stage.

A move takes the outer layer of one stage and gives a layer to another one; the stages between them each pass one on.
Moves start at the worker with the largest load (or at one over its limit), and if none is better there, at the next
one. A cut is better if the bytes over the limits are fewer, and of equal ones, if its loads are, largest first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipework.planning.cuts.tables import Places, Tables

FAR = 100  # stages between which a move goes at most
Key = tuple[int, list[int]]  # bytes over the limits; weighted loads, largest first


@dataclass
class LocalSearch:
    """Improves cuts of one problem.

    Attributes:
        tables: the problem.
        weights: the factor of each worker's load, in thousandths.
        steps: how many moves it may still look at; one that changes many stages counts as several.
    """

    tables: Tables
    weights: Sequence[int]
    steps: int

    def key(self, cut: Sequence[int]) -> Key:
        """What cuts are compared by."""
        tables = self.tables
        over = sum(max(0, size - limit) for size, limit in zip(tables.sizes(cut), tables.limits, strict=True))
        loads = (load * weight for load, weight in zip(tables.loads(cut), self.weights, strict=True))
        return over, sorted(loads, reverse=True)

    def improved(self, cut: Places) -> Places:
        """A cut that no move improves, or the best one when there are no steps left."""
        cut = list(cut)
        better = True
        while better:
            loads, sizes = self.tables.loads(cut), self.tables.sizes(cut)
            better = False
            for worker in self._worst_first(loads, sizes):
                move = self._best_move(cut, worker, loads, sizes)
                if self.steps < 0:
                    return cut
                if move is not None:
                    for place, step in move.items():
                        cut[place] += step
                    better = True
                    break
        return cut

    def _worst_first(self, loads: Sequence[int], sizes: Sequence[int]) -> list[int]:
        limits = self.tables.limits

        def badness(worker: int) -> tuple[int, int]:
            return max(0, sizes[worker] - limits[worker]), loads[worker] * self.weights[worker]

        return sorted(range(len(loads)), key=badness, reverse=True)

    def _best_move(self, cut: Places, worker: int, loads: Sequence[int], sizes: Sequence[int]) -> dict[int, int] | None:
        """The best move of a layer away from a worker, as steps of places; None if none improves the cut."""
        tables, limits = self.tables, self.tables.limits
        best: tuple[int, list[int]] | None = None
        found: dict[int, int] | None = None
        self.steps -= 1
        for move, stages in self._moves(cut, worker):
            self.steps -= 1 + len(stages) // 4
            new_loads: dict[int, int] = {}
            new_sizes: dict[int, int] = {}
            for stage in stages:
                at = tables.problem.placement[stage]
                start, end = cut[stage] + move.get(stage, 0), cut[stage + 1] + move.get(stage + 1, 0)
                time = tables.ends[stage][end] - tables.begins[stage][start]
                size = tables.memory[stage][end] - tables.memory[stage][start]
                new_loads[at] = new_loads.get(at, loads[at]) + time - tables.time(stage, cut)
                new_sizes[at] = new_sizes.get(at, sizes[at]) + size - tables.size(stage, cut)
            over = sum(max(0, size - limits[at]) - max(0, sizes[at] - limits[at]) for at, size in new_sizes.items())
            if over > 0:
                continue
            # Loads that stay do not change which of two sorted lists is smaller.
            after = sorted((load * self.weights[at] for at, load in new_loads.items()), reverse=True)
            now = sorted((loads[at] * self.weights[at] for at in new_loads), reverse=True)
            if over == 0 and after >= now:
                continue
            self.steps -= len(loads) // 8
            every = range(len(loads))
            rest = sorted((new_loads.get(at, loads[at]) * self.weights[at] for at in every), reverse=True)
            if best is None or (over, rest) < best:
                best, found = (over, rest), move
        return found

    def _moves(self, cut: Places, worker: int) -> Iterator[tuple[dict[int, int], range]]:
        """All moves of a layer away from the stages of a worker, and the stages that each changes."""
        last = len(cut) - 2
        for stage in self.tables.problem.held[worker]:
            if cut[stage + 1] - cut[stage] < 2:
                continue
            for other in range(stage + 1, min(last, stage + FAR) + 1):
                yield dict.fromkeys(range(stage + 1, other + 1), -1), range(stage, other + 1)
            for other in range(stage - 1, max(-1, stage - FAR - 1), -1):
                yield dict.fromkeys(range(other + 1, stage + 1), 1), range(other, stage + 1)
