"""Probes for V placement: is there a cut whose workers are all within their caps?

Worker 0 holds the first stage and the last, worker 1 the next inner ones, and so on: each takes a piece from the front
of what is left, and one from its back. A state is what is left: the layers from place `front` to place `back`. A state
within another one is at least as good, so of the states after each worker only a staircase is kept: a later front
always has a later back. For each length of the front piece, the back piece is as long as cap and limit allow.

"At least as good" leaves out that each stage must have a layer: what is left could be too little, or the wrong layer,
for a stage. A probe that allows empty stages is exact for cuts with such stages, so that its caps are lower bounds. A
probe that forbids them finds cuts that have none, and seldom misses the best one.

States are also left out whose layers are too many for the workers still to come, even if each had as much as its cap.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from pipework.planning.cuts.bounds import Shares
from pipework.planning.cuts.tables import Places, Tables


@dataclass(frozen=True)
class Nested:
    """A probe for V placement.

    Attributes:
        tables: the problem.
        shares: its work, by which states are left out.
        added: what the boundaries add to each worker's load, wherever they are.
        empty: whether stages may be empty.
        width: how many states are kept after each worker, evenly spread over the staircase; None: all. A probe that
            does not keep all may miss a cut.
    """

    tables: Tables
    shares: Shares
    added: Sequence[int]
    empty: bool = False
    width: int | None = None

    def probe(self, caps: Sequence[int]) -> Places | None:
        """A cut within the caps; None if there is none, or if it was missed."""
        tables, workers = self.tables, self.tables.problem.workers
        room = [cap - added for cap, added in zip(caps, self.added, strict=True)]
        if min(room) < 0:
            return None
        left = self.shares.left(room)
        stairs = {0: tables.places}  # front to back
        came: list[dict[int, int]] = []  # for each worker: the front before it, for each front after it
        passed = [stairs]
        for worker in range(workers):
            stairs, before = self._step(worker, stairs, room[worker], left[worker + 1])
            if not stairs:
                return None
            passed.append(stairs)
            came.append(before)
        front = next(iter(stairs))
        cut = [front]
        for worker in range(workers - 1, -1, -1):
            front = came[worker][front]
            cut = [front, *cut, passed[worker][front]]
        return cut

    def _step(
        self, worker: int, stairs: dict[int, int], room: int, most: float
    ) -> tuple[dict[int, int], dict[int, int]]:
        """The staircase after a worker, and the front that each of its states came from."""
        tables, work = self.tables, self.shares.work
        inner = tables.problem.workers - 1 - worker  # workers still to come
        mirrored = len(tables.sums) - 1 - worker
        head, tail = tables.sums[worker], tables.sums[mirrored]
        head_memory, tail_memory = tables.memory[worker], tables.memory[mirrored]
        limit = tables.limits[worker]
        least = 0 if self.empty else 1
        kept = 2 * least * inner
        best: dict[int, int] = {}
        before: dict[int, int] = {}
        for front, back in stairs.items():
            stop = back - least
            # The tail begins where its sum is this much, and what the head has in addition.
            taken, taken_memory = tail[back] - room - head[front], tail_memory[back] - limit - head_memory[front]
            start = bisect_left(tail, taken + head[front], front, back)
            for new in range(front + least, stop - kept + 1):
                reach, reach_memory = taken + head[new], taken_memory + head_memory[new]
                start = max(start, new + kept)
                while start <= stop and (tail[start] < reach or tail_memory[start] < reach_memory):
                    start += 1
                if start > stop:
                    break
                if best.get(new, start + 1) > start and work[start] - work[new] <= most:
                    best[new], before[new] = start, front
        if not inner:
            done = next((front for front, back in best.items() if front == back), None)
            return ({} if done is None else {done: done}), before
        stairs, lowest = {}, tables.places + 1
        for front in sorted(best, reverse=True):
            if best[front] < lowest:
                lowest = stairs[front] = best[front]
        return self._thinned(stairs), before

    def _thinned(self, stairs: dict[int, int]) -> dict[int, int]:
        """At most `width` states, evenly spread."""
        if self.width is None or len(stairs) <= self.width:
            return stairs
        states = list(stairs.items())
        return dict(states[index * len(states) // self.width] for index in range(self.width))
