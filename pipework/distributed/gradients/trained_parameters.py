"""Which parameters a replica trains, as numbers: their sum over all replicas tells whether these train the same ones.

A frozen layer concerns nobody but those who average its gradients, and it may be frozen or thawed between any two
steps. So it is no part of what all ranks agree on at the start, and is compared in each step.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

_SUMMED: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})  # by gloo and by NCCL
_SHOWN: Final = 5  # names in a message


class _Form(NamedTuple):
    """A parameter that gets a gradient, and what it was like."""

    parameter: Tensor
    dtype: torch.dtype
    shape: torch.Size


class TrainedParameters:
    """What one replica trains.

    Args:
        named: the parameters at the beginning, and perhaps other tensors, the same names on all replicas.

    Raises:
        TypeError: one of them requires a gradient which could not be averaged.

    Example:
        >>> weight, bias = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        >>> replica = TrainedParameters([("weight", weight), ("bias", bias)])
        >>> here, there = replica.told([weight, bias]), replica.told([weight])
        >>> replica.refuse_differences(here, here + here, 2)
        >>> replica.refuse_differences(here, here + there, 2)
        Traceback (most recent call last):
        ValueError: the replicas train different parameters: bias is trained by some of them only. Freeze, thaw,
        convert and replace parameters on all replicas alike
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        named = list(named)
        for name, tensor in named:
            if tensor.requires_grad:
                _refuse_to_sum(name, tensor)
        # Not weakly: PyTorch gives no memory to a parameter on the meta device that somebody refers to in that way.
        self._known = named
        self._forms: list[_Form] | None = None
        self._told = torch.empty(0)

    def told(self, parameters: Sequence[Tensor]) -> Tensor:
        """What is trained in a step: a number for each tensor known by name, and one for the forms of all.

        Args:
            parameters: that get a gradient, in the order in which they are averaged.

        Raises:
            TypeError: the gradient of one cannot be averaged.
        """
        if not self._is_unchanged(parameters):
            self._told = self._tell(parameters)
            self._forms = [_Form(each, each.dtype, each.shape) for each in parameters]
        return self._told

    def refuse_differences(self, mine: Tensor, total: Tensor, replicas: int) -> None:
        """Returns if all replicas train the same.

        Args:
            mine: what this one told.
            total: the sum of what all told.
            replicas: their number.

        Raises:
            ValueError: they do not; on at least one of them.
        """
        if torch.equal(total, mine * replicas):
            return
        pairs = zip(self._known, total.tolist()[:-1], strict=True)
        names = [name for (name, _), count in pairs if 0 < count < replicas]
        which = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        what = f"{which} {'is' if len(names) == 1 else 'are'} trained by some of them only"
        raise ValueError(
            f"the replicas train different parameters: {what if names else 'their shapes, dtypes or order differ'}. "
            "Freeze, thaw, convert and replace parameters on all replicas alike"
        )

    def _is_unchanged(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these are those of the last step."""
        if self._forms is None or len(self._forms) != len(parameters):
            return False
        pairs = zip(parameters, self._forms, strict=True)
        return all(now is form.parameter and now.dtype is form.dtype and now.shape == form.shape for now, form in pairs)

    def _tell(self, parameters: Sequence[Tensor]) -> Tensor:
        names = {id(tensor): name for name, tensor in self._known}
        for parameter in parameters:
            _refuse_to_sum(names.get(id(parameter), "that was replaced"), parameter)
        trained = {names.get(id(parameter)) for parameter in parameters}
        forms = str([(names.get(id(each)), each.dtype, tuple(each.shape)) for each in parameters])
        digest = int.from_bytes(hashlib.sha256(forms.encode()).digest()[:6])  # small: a sum of many has 64 bits
        return torch.tensor([*(name in trained for name, _ in self._known), digest], dtype=torch.int64)


def _refuse_to_sum(name: str, parameter: Tensor) -> None:
    if parameter.dtype.to_real() not in _SUMMED:
        raise TypeError(
            f"the parameter {name}, of {parameter.dtype} and shape {tuple(parameter.shape)}, learns, and its gradient "
            "cannot be averaged over replicas: keep it in float64, float32, bfloat16 or float16, or freeze it"
        )
