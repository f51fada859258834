"""What a synthesis has found, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from pipework.schedule import Schedule, Simulation


@dataclass(frozen=True)
class Synthesis:
    """The result of :func:`synthesize`; `print` shows it as a table.

    Attributes:
        schedule: the fastest schedule found, called ``"synthesised"``.
        simulation: its simulation, with the memory limit of the search.
        lower_bound: the best known bound of the makespan, which no schedule for these costs and this memory beats:
            that of :func:`lower_bound`, or one that the solver has proven.
        found_by: how it was found: what it began from, and what improved it last.
        named: name to makespan of the named and given schedules that fit the memory.
        seconds: how long the search took.
        solver: whether OR-tools took part.
        steps: how many windows or neighbours the search looked at.
    """

    schedule: Schedule
    simulation: Simulation = field(repr=False)
    lower_bound: float
    found_by: str
    named: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    seconds: float = 0.0
    solver: bool = False
    steps: int = 0

    @property
    def makespan(self) -> float:
        """The time from the first start to the last end."""
        return self.simulation.makespan

    @property
    def gap(self) -> float:
        """The excess of the makespan over the best known bound, as a share of that."""
        return max(0.0, self.makespan / self.lower_bound - 1.0) if self.lower_bound else 0.0

    @property
    def optimal(self) -> bool:
        """Whether it is proven that no schedule is faster."""
        return self.gap < 1e-6

    @property
    def gain(self) -> float:
        """How much slower the best named schedule is, as a share of the makespan; 0 if none fits the memory."""
        return min(self.named.values(), default=self.makespan) / self.makespan - 1.0 if self.makespan else 0.0

    def __str__(self) -> str:
        best = sorted(self.named.items(), key=lambda item: item[1])[:3]
        lines = [f"{'schedule':>18}  {'makespan':>10}  {'to bound':>8}"]
        for name, makespan in [(self.schedule.name, self.makespan), *best]:
            excess = f"{makespan / self.lower_bound - 1:.1%}" if self.lower_bound else ""
            lines.append(f"{name:>18}  {makespan:>10.6g}  {excess:>8}")
        lines.append(f"{'best known bound':>18}  {self.lower_bound:>10.6g}")
        proven = ", proven optimal" if self.optimal else ""
        with_solver = "with OR-tools" if self.solver else "without OR-tools (pip install ortools finds more)"
        return "\n".join([*lines, f"found by {self.found_by}{proven}, in {self.seconds:.1f} s, {with_solver}"])
