"""Where the loss is in what a model returns."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_NAME = "loss"


@dataclass(frozen=True)
class LossPlace:
    """The place of the loss: the whole result, its entry or attribute `loss`, or the first element of a tuple.

    Attributes:
        key: "loss" or 0; None: the result is the loss.
    """

    key: str | int | None

    @classmethod
    def in_result(cls, result: Any) -> LossPlace | None:
        """None: there is no loss, as of a model that was called without labels.

        Example:
            >>> import torch
            >>> LossPlace.in_result({"loss": torch.zeros(()), "logits": torch.zeros(2)})
            LossPlace(key='loss')
            >>> LossPlace.in_result(torch.zeros(2)) is None
            True
        """
        keys: tuple[str | int | None, ...] = (None,)
        if isinstance(result, tuple) and not hasattr(result, _NAME):
            keys = (0,)
        elif not isinstance(result, Tensor):
            keys = (_NAME,)
        for place in map(cls, keys):
            loss = place.read(result)
            if isinstance(loss, Tensor) and not loss.dim() and loss.is_floating_point():
                return place
        return None

    def read(self, result: Any) -> Any:
        """The loss of a result; None: there is none."""
        if self.key is None:
            return result
        if isinstance(self.key, int):
            return result[self.key] if result else None
        return result.get(self.key) if isinstance(result, Mapping) else getattr(result, self.key, None)

    def put(self, loss: Tensor, result: Any) -> Any:
        """The result with another loss."""
        if self.key is None:
            return loss
        if isinstance(self.key, int):
            return (loss, *result[1:])
        if isinstance(result, tuple):  # with names
            return type(result)(**{**result._asdict(), self.key: loss})  # type: ignore[attr-defined]
        result = copy.copy(result)
        if isinstance(result, MutableMapping):
            result[self.key] = loss
        else:
            object.__setattr__(result, self.key, loss)  # also where the class is frozen
        return result
