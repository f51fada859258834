"""Refuses a stage that changes a tensor in place after it was stashed and before the stage that pops it has run.

In the un-partitioned module, the layer that pops would read the changed tensor. In a pipe, value and skip are separate
tensors, copies if devices or processes differ, and it would read the unchanged one. So the value carries a mark for
each of its tensors that shares memory with a skip, and a stage that changes a marked tensor raises an error. So does a
stage that changes what it pops if another stage pops it, too: its gradient would not pass through that change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pipework.torch_private import counted_version
from pipework.values.shared_memory import share_memory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from pipework.runtime.skips.skip import Skip
    from pipework.values.nested import Structure


class Stashed(NamedTuple):
    """The structure of a value of which some tensors were stashed by an earlier stage.

    Attributes:
        structure: of the value.
        which: pairs of the number of a tensor and the number of a skip. Both share memory.
        same: pairs of the same kind, where the tensor is that of the skip itself. Then the gradients of both are added
            up in one stage.
    """

    structure: Structure | None
    which: tuple[tuple[int, int], ...] = ()
    same: tuple[tuple[int, int], ...] = ()


class Arrived(NamedTuple):
    """An input of a stage that an earlier stage has stashed; the stage pops it, or gets it as a part of the value.

    Attributes:
        skip: the number of the skip.
        tensor: the input, as the layers get it.
        version: of the tensor before the layers run.
    """

    skip: int
    tensor: Tensor
    version: int


class StashedTensors:
    """The stashed tensors that pass through one stage.

    Args:
        stage: its number.
        skips: all of the pipe.
    """

    def __init__(self, stage: int, skips: Sequence[Skip]) -> None:
        self._stage = stage
        self._skips = skips
        self._further = {n for n, skip in enumerate(skips) if skip.source <= stage < max(skip.destinations)}
        self._popped_elsewhere = {n for n, skip in enumerate(skips) if set(skip.later) - {stage}}

    def arrived(self, value: Sequence[Tensor], stashed: Stashed, popped: Mapping[int, Tensor]) -> list[Arrived]:
        """The inputs that the stage must not change, before its layers run.

        The last stage that pops may change its input if no gradient is wanted: the others have read it.

        Args:
            value: the tensors of the value.
            stashed: what describes them.
            popped: by the number of a skip, what the stage pops.
        """
        found = [(skip, value[n]) for n, skip in stashed.which]
        found += [
            (skip, tensor)
            for skip, tensor in popped.items()
            if skip in self._further or (skip in self._popped_elsewhere and tensor.requires_grad)
        ]
        return [Arrived(skip, tensor, counted_version(tensor)) for skip, tensor in found]

    def refuse_overwritten(self, arrived: Sequence[Arrived]) -> None:
        """Checks the stashed inputs after the layers have run.

        Args:
            arrived: the stashed inputs.

        Raises:
            RuntimeError: the layers have changed one of them in place.
        """
        for skip, tensor, version in arrived:
            if counted_version(tensor) != version:
                key, source = self._skips[skip].key, self._skips[skip].source
                name = key[1] if isinstance(key, tuple) else key
                if skip in self._further:
                    why, remedy = "it is still to be popped", "stash a clone"
                else:
                    why, remedy = "another stage has popped it, too", "clone it first"
                raise RuntimeError(
                    f"stage {self._stage} has changed skip tensor {name!r} in place after it was stashed by stage "
                    f"{source}, and {why}; {remedy}, or make that layer not in-place"
                )

    def marking(
        self,
        structure: Structure | None,
        outputs: Sequence[Tensor],
        arrived: Sequence[Arrived],
        stashed: Sequence[tuple[int, Tensor]],
        same: tuple[tuple[int, int], ...] = (),
    ) -> Structure | Stashed | None:
        """The structure of the stage's outputs, with a mark for each that shares memory with a skip.

        Args:
            structure: without marks.
            outputs: the tensors for the next stage.
            arrived: the stashed tensors among the inputs.
            stashed: by the stage itself, each with the number of its skip.
            same: see `Stashed`.
        """
        tensors = [*((each.skip, each.tensor) for each in arrived), *stashed]
        which = [
            (n, skip)
            for skip, tensor in tensors
            if skip in self._further
            for n, output in enumerate(outputs)
            if share_memory(tensor, output)
        ]
        return Stashed(structure, tuple(which), same) if which or same else structure
