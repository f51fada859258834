"""The alias leaf of a DTensor whose gradient can be deferred. Imported only where a parameter is a DTensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor

from pipework.autograd.weight_split.store import WeightGradientAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from pipework.autograd.weight_split.store import WeightGradientStore


class DTensorAlias(DTensor, WeightGradientAlias):
    """A DTensor whose operators run in detached graphs: autograd chooses the placements of its gradients."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """As for other aliases. PyTorch calls none of a DTensor."""
        return WeightGradientAlias.__torch_function__.__func__(cls, func, types, args, kwargs)  # type: ignore[attr-defined]


def dtensor_alias(plain: Tensor, weight_store: WeightGradientStore, deferred: bool | None) -> DTensorAlias:
    """An alias of a parameter; see `WeightGradientAlias.of`.

    A detached tensor gets the class, since a DTensor that is made anew would count its versions by itself.
    """
    alias: Any = plain.detach().requires_grad_()
    alias.__class__ = DTensorAlias
    # No formula of `operators` is for it.
    return alias.filled(plain, weight_store, deferred, is_factor=False)  # type: ignore[no-any-return]
