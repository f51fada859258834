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
    from pipework.planning.layer_costs import MicroBatchProfile
    from pipework.planning.profiles import Profile


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
    def _measured(self) -> MicroBatchProfile:
        return self.profile.at(self.rows)

    @cached_property
    def _second_sums(self) -> dict[str, list[list[float]]]:
        """By kind of device, those of F, I and W."""
        return {name: list(map(_sums, zip(*layers, strict=True))) for name, layers in self._measured.seconds.items()}

    @cached_property
    def activations(self) -> list[int]:
        """The bytes that a micro-batch holds on each layer, if the next one is on the same stage."""
        sizes = self._measured.bytes
        following = (*sizes[1:], sizes[-1])
        return [each.kept + each.output_kept * after.saves_input for each, after in zip(sizes, following, strict=True)]

    @cached_property
    def fixed(self) -> list[float]:
        """The bytes of each layer that do not depend on micro-batches: weights, gradients, buffers, optimizer."""
        return [layer.weights + layer.trained * (1 + self.optimizer) + layer.buffers for layer in self.profile.layers]

    @cached_property
    def _byte_sums(self) -> tuple[list[float], ...]:
        """Of the fixed bytes, of the activations, of what waits between I and W, and of what no ``O`` moves."""
        waiting, staying = zip(*((each.waiting, each.stays) for each in self._measured.bytes), strict=True)
        return _sums(self.fixed), _sums(self.activations), _sums(waiting), _sums(staying)

    def layer_seconds(self, kind: str, *, again: float = 0.0) -> list[float]:
        """F + I + W of each layer on a kind of device, and of a share of recomputed micro-batches F once more."""
        return [(1 + again) * f + i + w for f, i, w in self._measured.seconds[kind]]

    def least_bytes(self) -> list[int]:
        """The bytes that each layer needs for one micro-batch if it is alone on its stage."""
        return [each.input + each.kept + each.temporary for each in self._measured.bytes]

    def costs(self, balance: Sequence[int], kinds: Sequence[str]) -> Costs:
        """The costs of the stages of a cut, each on a kind of device, in seconds and bytes."""
        sizes, kept, waiting, staying = self._measured.bytes, *self._byte_sums[1:]
        spans, sums = _spans(balance), self._second_sums
        forward, inputs, weights = (
            [sums[kind][index][end] - sums[kind][index][begin] for (begin, end), kind in zip(spans, kinds, strict=True)]
            for index in range(3)
        )
        held = [kept[end - 1] - kept[begin] + sizes[end - 1].kept + sizes[begin].input for begin, end in spans]
        checkpointed = [float(sizes[begin].input) for begin, _ in spans]
        sent = [sizes[end - 1].output for _, end in spans[:-1]]
        skips = self.skips_between(balance)
        for (stashing, popping), size in skips.items():
            held[popping] += size
            checkpointed[popping] += size
            if popping == stashing + 1:  # it goes with the value
                sent[stashing] += size
        transfer, hosts = self.profile.transfer, [self.profile.kinds[kind].host for kind in kinds]
        # Inputs stay: layers and the stage before may use them.
        offloaded = [
            size + staying[end] - staying[begin] for size, (begin, end) in zip(checkpointed, spans, strict=True)
        ]
        copying = [
            0.0 if host is None else host.seconds(whole - size)
            for host, whole, size in zip(hosts, held, offloaded, strict=True)
        ]
        return Costs(
            forward=forward,
            backward=[i + w for i, w in zip(inputs, weights, strict=True)],
            input_gradient=inputs,
            weight_gradient=weights,
            transfer=[transfer(*ends, size) for ends, size in zip(pairwise(kinds), sent, strict=True)],
            skip_transfer=[transfer(kinds[a], kinds[b], skips[a, b]) for a, b in far_skips(skips)],
            activation=held,
            checkpoint_activation=checkpointed,
            waiting=[waiting[end] - waiting[begin] for begin, end in spans],
            message=sent,
            offload=copying,
            reload=copying,
            offloaded=offloaded,
            # The first stage's input is the caller's, and stays.
            checkpoint_offloaded=[checkpointed[0], *[0.0] * (len(spans) - 1)],
        )

    def skips_between(self, balance: Sequence[int]) -> dict[tuple[int, int], int]:
        """The bytes that skip connections bring from a stage to another one, which holds them, in ascending order."""
        ends = list(accumulate(balance))
        found: dict[tuple[int, int], int] = {}
        for skip, size in zip(self.profile.skips, self._measured.skips, strict=True):
            stages = bisect_right(ends, skip.source), bisect_right(ends, skip.target)
            if stages[0] != stages[1]:
                found[stages] = found.get(stages, 0) + size
        return dict(sorted(found.items()))

    def fixed_bytes(self, balance: Sequence[int]) -> list[float]:
        """Of each stage: weights, gradients, buffers and the optimizer's state."""
        sums = self._byte_sums[0]
        return [sums[end] - sums[begin] for begin, end in _spans(balance)]

    def temporary_bytes(self, balance: Sequence[int]) -> list[float]:
        """Of each stage: what its actions need beside what micro-batches hold, with a message in each direction."""
        sizes = self._measured.bytes
        return [
            max(each.temporary for each in sizes[begin:end]) + 2 * sizes[begin].input + 2 * sizes[end - 1].output
            for begin, end in _spans(balance)
        ]


def _sums(numbers: Iterable[float]) -> list[float]:
    return list(accumulate(numbers, initial=0.0))


def _spans(balance: Sequence[int]) -> list[tuple[int, int]]:
    """The first layer of each stage, and the first one after it."""
    return list(pairwise(accumulate(balance, initial=0)))
