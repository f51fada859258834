"""Fingerprints of the trained parameters: their sum over all replicas shows whether these train the same ones.

A layer may be frozen or unfrozen between any two steps, and only the ranks that average its gradients must know. So
this is no part of the comparison of all ranks at the start, but is compared in each step.
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
    """A parameter that gets a gradient, with its dtype and shape at that time."""

    parameter: Tensor
    dtype: torch.dtype
    shape: torch.Size


class TrainedParameters:
    """The parameters that one replica trains.

    Args:
        named: the parameters at the beginning, and perhaps other tensors, the same names on all replicas.

    Raises:
        TypeError: the gradient of a parameter could not be averaged.

    Example:
        >>> weight, bias = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        >>> replica = TrainedParameters([("weight", weight), ("bias", bias)])
        >>> here, there = replica.fingerprint([weight, bias]), replica.fingerprint([weight])
        >>> replica.refuse_differences(here, here + here, 2)
        >>> replica.refuse_differences(here, here + there, 2)
        Traceback (most recent call last):
        ValueError: the replicas train different parameters: bias is trained by some of them only. Freeze, unfreeze,
        convert and replace parameters on all replicas
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        named = list(named)
        for name, tensor in named:
            if tensor.requires_grad:
                _refuse_to_sum(name, tensor)
        # No weak references: with one, PyTorch cannot give memory to a parameter on the meta device.
        self._known = named
        self._forms: list[_Form] | None = None
        self._fingerprint = torch.empty(0)

    def fingerprint(self, parameters: Sequence[Tensor]) -> Tensor:
        """The parameters that a step trains: 0 or 1 for each tensor known by name, and a digest of the forms of all.

        Args:
            parameters: that get a gradient, in the order in which these are averaged.

        Raises:
            TypeError: a gradient cannot be averaged.
        """
        if not self._is_unchanged(parameters):
            self._fingerprint = self._compute(parameters)
            self._forms = [_Form(each, each.dtype, each.shape) for each in parameters]
        return self._fingerprint

    def refuse_differences(self, mine: Tensor, total: Tensor, replicas: int) -> None:
        """Raises an error if the replicas train different parameters.

        Args:
            mine: the fingerprint of this replica.
            total: the sum of all fingerprints.
            replicas: their number.

        Raises:
            ValueError: that is so; it is raised on at least one of them.
        """
        if torch.equal(total, mine * replicas):
            return
        pairs = zip(self._known, total.tolist()[:-1], strict=True)
        names = [name for (name, _), count in pairs if 0 < count < replicas]
        which = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        what = f"{which} {'is' if len(names) == 1 else 'are'} trained by some of them only"
        raise ValueError(
            f"the replicas train different parameters: {what if names else 'their shapes, dtypes or order differ'}. "
            "Freeze, unfreeze, convert and replace parameters on all replicas"
        )

    def _is_unchanged(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these are the parameters of the last step."""
        if self._forms is None or len(self._forms) != len(parameters):
            return False
        pairs = zip(parameters, self._forms, strict=True)
        return all(now is form.parameter and now.dtype is form.dtype and now.shape == form.shape for now, form in pairs)

    def _compute(self, parameters: Sequence[Tensor]) -> Tensor:
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
            f"the parameter {name}, of {parameter.dtype} and shape {tuple(parameter.shape)}, is trained, and its "
            "gradient cannot be averaged over replicas: keep it in float64, float32, bfloat16 or float16, or freeze it"
        )
