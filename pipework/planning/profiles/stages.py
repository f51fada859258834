"""The stages of a cut: their costs for the simulation, and the bytes that stay on their devices."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from pipework.schedule import Costs

if TYPE_CHECKING:
    from pipework.planning.profiles.layer_costs import LayerBytes
    from pipework.planning.profiles.profile import Profile


def far_skips(skips: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those pairs of stages between which there are others: a schedule has these as its skips.

    Example:
        >>> far_skips([(0, 1), (0, 3)])
        [(0, 3)]
    """
    return [(source, target) for source, target in skips if target > source + 1]


@dataclass(frozen=True)
class StageSums:
    """Sums over consecutive layers for micro-batches of one size, which make the costs of any cut quickly.

    Attributes:
        profile: of the layers.
        rows: of a micro-batch.
        optimizer: the numbers that the optimizer keeps for each trained one.
    """

    profile: Profile
    rows: int
    optimizer: float

    @cached_property
    def _sizes(self) -> tuple[LayerBytes, ...]:
        return self.profile.at(self.rows).bytes

    @cached_property
    def _skips(self) -> tuple[int, ...]:
        return self.profile.at(self.rows).skips

    @cached_property
    def _seconds(self) -> dict[str, list[list[float]]]:
        """By kind of device, sums of F, I and W over the first layers, without what joined layers save."""
        found = {}
        for name, layers in self.profile.at(self.rows).seconds.items():
            joined = self.profile.kinds[name].joined
            # What is saved grows with the layers of a stage, and a layer takes no negative time.
            columns = zip(*layers, strict=True)
            found[name] = [
                list(accumulate((max(0.1 * each, each - saved) for each in column), initial=0.0))
                for column, saved in zip(columns, joined, strict=True)
            ]
        return found

    @cached_property
    def _kept(self) -> list[int]:
        held = [
            each.kept + each.output_kept * after.saves_input
            for each, after in zip(self._sizes, (*self._sizes[1:], self._sizes[-1]), strict=True)
        ]
        return list(accumulate(held, initial=0))

    @cached_property
    def _waiting(self) -> list[int]:
        return list(accumulate((each.waiting for each in self._sizes), initial=0))

    @cached_property
    def fixed(self) -> list[float]:
        """The bytes of each layer that do not depend on micro-batches: weights, gradients, buffers, optimizer."""
        return [layer.weights + layer.trained * (1 + self.optimizer) + layer.buffers for layer in self.profile.layers]

    @cached_property
    def _fixed_sums(self) -> list[float]:
        return list(accumulate(self.fixed, initial=0.0))

    def layer_seconds(self, kind: str, *, again: float = 0.0) -> list[float]:
        """F + I + W of each layer on a kind of device, and of a share of recomputed micro-batches F once more."""
        forward, inputs, weights = (
            [after - before for before, after in pairwise(sums)] for sums in self._seconds[kind]
        )
        return [(1 + again) * f + i + w for f, i, w in zip(forward, inputs, weights, strict=True)]

    def layer_chain_seconds(self, kind: str) -> list[float]:
        """F + I of each layer on a kind of device: what the next micro-batch's way back waits for."""
        forward, inputs, _ = ([after - before for before, after in pairwise(sums)] for sums in self._seconds[kind])
        return list(map(sum, zip(forward, inputs, strict=True)))

    def layer_activations(self) -> list[int]:
        """The bytes that a micro-batch holds on each layer."""
        return [after - before for before, after in pairwise(self._kept)]

    def layer_least_bytes(self) -> list[int]:
        """The bytes that each layer needs for one micro-batch if it is alone on its stage."""
        return [each.input + each.kept + each.temporary for each in self._sizes]

    def costs(self, balance: Sequence[int], kinds: Sequence[str]) -> Costs:
        """The costs of the stages of a cut, each on a kind of device, in seconds and bytes."""
        sizes = self._sizes
        ends = list(accumulate(balance, initial=0))
        spans = list(pairwise(ends))
        times: list[list[float]] = []
        for index in range(3):
            times.append(
                [
                    self._seconds[kind][index][end] - self._seconds[kind][index][begin] + self._own(kind, index)
                    for (begin, end), kind in zip(spans, kinds, strict=True)
                ]
            )
        forward, inputs, weights = times
        inner = [
            self._kept[end - 1] - self._kept[begin] + sizes[end - 1].kept + sizes[begin].input for begin, end in spans
        ]
        small = [sizes[begin].input for begin, _ in spans]
        sent = [sizes[end - 1].output for _, end in spans[:-1]]
        skips = self.skips_between(balance)
        for (stashing, popping), size in skips.items():
            inner[popping] += size
            small[popping] += size
            if popping == stashing + 1:  # it goes with the value
                sent[stashing] += size
        far = far_skips(skips)
        return Costs(
            forward=forward,
            backward=[i + w for i, w in zip(inputs, weights, strict=True)],
            input_gradient=inputs,
            weight_gradient=weights,
            transfer=[self.profile.transfer(*ends, size) for ends, size in zip(pairwise(kinds), sent, strict=True)],
            skip_transfer=[self.profile.transfer(kinds[a], kinds[b], skips[a, b]) for a, b in far],
            activation=inner,
            checkpoint_activation=small,
            waiting=[self._waiting[end] - self._waiting[begin] for begin, end in spans],
            message=sent,
        )

    def skips_between(self, balance: Sequence[int]) -> dict[tuple[int, int], int]:
        """The bytes that skip connections bring from a stage to another one, which holds them, in ascending order."""
        ends = list(accumulate(balance))
        found: dict[tuple[int, int], int] = {}
        for skip, size in zip(self.profile.skips, self._skips, strict=True):
            stages = bisect_right(ends, skip.source), bisect_right(ends, skip.target)
            if stages[0] != stages[1]:
                found[stages] = found.get(stages, 0) + size
        return dict(sorted(found.items()))

    def _own(self, kind: str, index: int) -> float:
        """What a stage's action takes beside its layers' time."""
        return self.profile.kinds[kind].joined[index]

    def fixed_bytes(self, balance: Sequence[int]) -> list[float]:
        """Of each stage: weights, gradients, buffers and the optimizer's state."""
        ends = list(accumulate(balance, initial=0))
        return [self._fixed_sums[end] - self._fixed_sums[begin] for begin, end in pairwise(ends)]

    def temporary_bytes(self, balance: Sequence[int]) -> list[float]:
        """Of each stage: what its actions need beside what micro-batches hold, with a message in each direction."""
        sizes = self._sizes
        ends = list(accumulate(balance, initial=0))
        return [
            max(each.temporary for each in sizes[begin:end]) + 2 * sizes[begin].input + 2 * sizes[end - 1].output
            for begin, end in pairwise(ends)
        ]
