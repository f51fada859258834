"""The layer group: the ranks that compute the same layers together, each with a part of them, on the same data.

Tensor, sequence and context parallelism are such. The layers call their collectives themselves. Each of these ranks is
a worker of a pipe of its own, and all of these pipes must do the same: a rank that was given other rows, or is called
once more than the others, would wait in a collective forever or mix up values. So they agree before each call.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pipework.distributed.data_digest import NO_DATA
from pipework.distributed.transport.channel import LostConnectionError, break_group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from pipework.distributed.transport.channel import Group

NO_KEY = -1


class LayerCall(NamedTuple):
    """What a rank says of a call of its pipe.

    Attributes:
        call: its number.
        flags: how the pipe is called, see `StepHeader`.
        marks: see `DeliveredLosses`.
        has_target: whether a target was given.
        trained: a digest of which parameters are trained.
        rows: of the mini-batch; on ranks that do not read it, 0.
        micro_batches: how many it is split into; 0 there.
        inputs: a digest of the inputs; `NO_DATA` there, or in a call that is not checked.
        targets: likewise.
        gradients: which inputs require one, see `StepData`; 0 there.
        key: of the random numbers, or `NO_KEY`.
    """

    call: int
    flags: int
    marks: int
    has_target: int
    trained: int
    rows: int
    micro_batches: int
    inputs: int
    targets: int
    gradients: int
    key: int


_DIFFERENT = {
    "call": "is in another call of the pipe",
    "flags": "calls the pipe in another way (in another mode of training or of gradients, with other outputs)",
    "marks": "called loss.backward() for other calls of the pipe",
    "has_target": "differs in whether there is a target",
    "trained": "trains other parameters",
    "rows": "was given a mini-batch of another number of rows",
    "micro_batches": "was given another number of micro-batches",
    "inputs": "was given other inputs",
    "targets": "was given other targets",
    "gradients": "was given inputs of which others require a gradient",
}


_OTHER_DATA = (
    "Seed alike before data is drawn or shuffled, or give the layer group one sampler, pipe.sampler(dataset); other "
    "rows belong to replicas, along the dimension 'dp', or along others that are named: "
    "pipework.Mesh.of(mesh, replicas=('dp', 'ep'))"
)
_WAYS_OUT = {
    "trained": "Freeze and unfreeze parameters on all of them",
    **dict.fromkeys(("rows", "micro_batches", "inputs", "targets"), _OTHER_DATA),
}


class LayerGroup:
    """The ranks of one layer group, as one of them sees them.

    Args:
        group: of these ranks.
        ranks: their numbers in the job.
        dimensions: of the mesh, over which the layers are sharded.
    """

    def __init__(self, group: Group, ranks: Sequence[int], dimensions: Sequence[str]) -> None:
        self._group: Any = group
        self._ranks = ranks
        self.dimensions = dimensions

    def agree(self, mine: LayerCall) -> LayerCall:
        """Compares a call with those of the other ranks, all of which call this.

        Returns:
            The call, with the key of the first rank.

        Raises:
            ValueError: the calls differ; all ranks raise it, and name one that differs from most.
            LostConnectionError: a rank is gone.
        """
        calls = [LayerCall(*numbers) for numbers in self._gather(mine)]
        for name, text in _DIFFERENT.items():
            values = [getattr(call, name) for call in calls]
            if name in ("inputs", "targets") and NO_DATA in values:
                continue  # it is not read there
            usual = Counter(values).most_common(1)[0][0]
            if different := [rank for rank, value in zip(self._ranks, values, strict=True) if value != usual]:
                same = next(rank for rank, value in zip(self._ranks, values, strict=True) if value == usual)
                over = ", ".join(map(repr, self.dimensions))
                raise ValueError(
                    f"rank {different[0]} {text} than rank {same}, in call {mine.call} of the pipe. Both compute the "
                    f"same layers together, over {over} of the mesh, so all such ranks make the same calls with the "
                    f"same mini-batches. {_WAYS_OUT.get(name, 'Call the pipe alike on all of them')}"
                )
        return mine._replace(key=calls[0].key)

    def extremes(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """The lowest and the highest that any of the ranks has of each of some integers; all of them call this."""
        gathered = torch.tensor(self._gather(numbers.tolist()), dtype=torch.int64)
        return gathered.amin(0), gathered.amax(0)

    def any_of(self, flag: bool) -> bool:
        """Whether the flag is set on any of the ranks, all of which call this."""
        return any(number for (number,) in self._gather([int(flag)]))

    def abort(self) -> None:
        """Ends all transfers for good."""
        break_group(self._group)

    def _gather(self, numbers: Sequence[int]) -> list[list[int]]:
        own = torch.tensor(list(numbers), dtype=torch.int64)
        gathered = [torch.empty_like(own) for _ in self._ranks]
        try:
            self._group.allgather([gathered], [own]).wait()
        except RuntimeError as error:
            raise LostConnectionError(None) from error
        return [each.tolist() for each in gathered]
