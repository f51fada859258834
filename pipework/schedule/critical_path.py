"""The critical path: the chain of actions that makes a timeline as long as it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from pipework.schedule.action import Action
from pipework.schedule.edges import routes
from pipework.schedule.schedule import Schedule
from pipework.schedule.timeline import Interval, Timeline


def critical_path(schedule: Schedule, timeline: Timeline) -> tuple[Interval, ...]:
    """Walk back from the end, each time to what the action waited for last.

    Where several things ended at that very moment, the worker's own last action is taken, so that the path changes
    workers as rarely as it can.

    Args:
        schedule: what was run.
        timeline: the predicted times; with measured ones nothing ends exactly when something else starts.

    Returns:
        Intervals of computation and communication in the order of time, the last of which ends last.

    Example:
        >>> from pipework.schedule import fill_drain, simulate
        >>> [str(each.action) for each in simulate(fill_drain(2, 2)).critical_path]
        ['0F0', '1F0', '1F1', '1B0', '0B0', '0B1']
    """
    everything = (*timeline.intervals, *timeline.communication)
    if not everything:
        return ()
    causes = _Causes(schedule, timeline)
    path = [max(everything, key=lambda each: each.end)]
    seen = set(path)
    while path[-1].start > timeline.start:
        previous = next((each for each in causes.of(path[-1]) if each not in seen), None)
        if previous is None:
            break
        path.append(previous)
        seen.add(previous)
    return tuple(reversed(path))


class _Causes:
    """What an interval may have waited for."""

    def __init__(self, schedule: Schedule, timeline: Timeline) -> None:
        self._timeline = timeline
        self._place = schedule.placement
        self._by_action = {each.action: each for each in (*timeline.intervals, *timeline.communication)}
        self._before = {
            row[position].action: row[position - 1] if position else None
            for row in timeline.by_worker
            for position in range(len(row))
        }
        self._ended: dict[tuple[int, float], list[Interval]] = defaultdict(list)
        for each in self._by_action.values():
            self._ended[each.worker, each.end].append(each)
        self._sources: dict[tuple[str, int], list[int]] = defaultdict(list)
        for kind, source, target, _ in routes(schedule):
            self._sources[kind, target].append(source)

    def of(self, now: Interval) -> Iterator[Interval]:
        """The possible causes, the likeliest first."""
        if now.action in self._before:
            return self._of_computation(now)
        return self._of_communication(now)

    def _of_computation(self, now: Interval) -> Iterator[Interval]:
        kind, stage, micro_batch, _ = now.action
        previous = self._before[now.action]
        if previous is not None and previous.end == now.start:
            yield previous
        needed = []
        direction = "F" if kind == "F" else "B"
        for source in self._sources[direction, stage] if kind in ("F", "B", "I") else ():
            names = [Action(kind, source, micro_batch) for kind in (direction, "I")]
            names.insert(0, Action(f"RECV_{direction}", stage, micro_batch, source))
            needed += [self._by_action[name] for name in names if name in self._by_action][:1]
        # What came last was waited for; without transfers in the timeline, that is what ended last but for its way.
        yield from sorted((each for each in needed if each.end <= now.start), key=lambda each: -each.end)
        # A loss outside waits for the last forward of all.
        for each in self._timeline.intervals:
            if each.end == now.start and each.action.kind == "F":
                yield each

    def _of_communication(self, now: Interval) -> Iterator[Interval]:
        """An action that ended when this was posted, or what was before it in a queue."""
        peer = now.action.peer
        workers = {now.worker} if peer < 0 else {now.worker, self._place[peer]}
        ended = [each for worker in sorted(workers) for each in self._ended[worker, now.start]]
        yield from sorted(ended, key=lambda each: each.action not in self._before)
