"""A skip connection: which stages stash and pop a tensor, and the ways that it and its gradient go between them.

If several stages of one place (a process, or a device) pop, the value is sent there once. The gradients go from the
last stage that pops through all others to the source: each begins its backward with the sum of those above.

A stage may also return the tensor that it stashes. Then the next stage uses that tensor, too, and the sum goes to the
next stage instead of to the source. Only the source knows whether it has returned the tensor, which may differ between
micro-batches. So the source marks the value for the next stage (`Stashed.same`), and the skip for the first stage that
pops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable


@dataclass(frozen=True)
class Skip:
    """A skip connection.

    Attributes:
        key: the name by which layers stash and pop.
        source: the stage that stashes.
        destinations: the stages that pop, in ascending order; the source may be among them.
        places: of each stage of the pipe, where its tensors are: its process, or its device.
    """

    key: Hashable
    source: int
    destinations: tuple[int, ...]
    places: tuple[Hashable, ...]

    @property
    def later(self) -> tuple[int, ...]:
        """The stages that pop, without the source, whose own layers use the tensor directly."""
        return tuple(stage for stage in self.destinations if stage != self.source)

    def value_from(self, stage: int) -> int:
        """The stage that hands the value to this one: the last one before it in the same place, else the source.

        Example:
            >>> skip = Skip("a", 0, (1, 2, 3), places=(0, 1, 0, 1))
            >>> [skip.value_from(stage) for stage in (1, 2, 3)]
            [0, 0, 1]
        """
        earlier = [each for each in self.later if each < stage and self.places[each] == self.places[stage]]
        return earlier[-1] if earlier else self.source

    def gradient_to(self, stage: int) -> int:
        """The stage to which this one hands the gradient: the one below it that pops, too, else the source.

        Autograd adds the uses of a tensor one after the other, from the last one to the first. So the sum of the
        stages above is the first gradient that autograd finds in the stage below, which adds its own uses to it.

        Example:
            >>> skip = Skip("a", 0, (1, 2, 3, 5), places=(0, 1, 0, 1, 0, 1))
            >>> [skip.gradient_to(stage) for stage in (1, 2, 3, 5)]
            [0, 1, 2, 3]
        """
        return max((each for each in self.later if each < stage), default=self.source)

    @property
    def stage_after_source(self) -> int | None:
        """The stage that gets the gradient from the first stage that pops, if the source has also returned the tensor.

        None: the stage after the source pops the tensor itself, and the gradient of its input has that of the skip.

        Example:
            >>> skip, next_pops = Skip("a", 0, (2, 4), places=(0,) * 5), Skip("a", 0, (1, 4), places=(0,) * 5)
            >>> skip.stage_after_source, next_pops.stage_after_source
            (1, None)
        """
        return self.source + 1 if self.later and self.later[0] > self.source + 1 else None

    @property
    def hops(self) -> frozenset[tuple[int, int]]:
        """The pairs of stages of which the first sends the value, or the gradient, to the second, or may send it.

        Example:
            >>> sorted(Skip("a", 0, (2, 4), places=(0, 1, 2, 3, 4)).hops)
            [(0, 2), (0, 4), (2, 0), (2, 1), (4, 2)]
        """
        values = {(self.value_from(stage), stage) for stage in self.later}
        gradients = {(stage, self.gradient_to(stage)) for stage in self.later}
        return frozenset(
            values | gradients | ({(self.later[0], self.stage_after_source)} if self.stage_after_source else set())
        )
