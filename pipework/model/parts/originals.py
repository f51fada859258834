"""What the model itself has once a pipe runs its parts: the tensors of this process, under the model's own names.

Units share their dictionaries of tensors with the model's own modules. The containers around them are copies in each
part, so that what changes there must be given to the model's own containers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipework.model.release import released_from

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor, nn


def take_over(containers: Mapping[str, nn.Module], here: Iterable[nn.Module], elsewhere: Iterable[nn.Module]) -> None:
    """Gives the model's containers the tensors that parts have now.

    Args:
        containers: of the model, by their names.
        here: the copies of the model in the parts of this process; of a tensor that several have, the first one counts.
        elsewhere: the same of the parts of other processes, whose tensors have no values.
    """
    done: set[tuple[str, str]] = set()
    for copy in (*here, *elsewhere):
        for name, container in containers.items():
            own = copy.get_submodule(name)
            for kind in ("_parameters", "_buffers"):
                for each, tensor in getattr(own, kind).items():
                    if tensor is not None and (name, each) not in done:
                        done.add((name, each))
                        getattr(container, kind)[each] = tensor


class OwnParameters:
    """Takes the place of a model's `named_parameters` where other processes have some of its parameters.

    So an optimizer of `model.parameters()` has what this process trains.

    Args:
        model: whose units have been distributed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The parameters of this process."""
        every = type(self._model).named_parameters(self._model, prefix, recurse, remove_duplicate)
        return ((name, parameter) for name, parameter in every if released_from(parameter) is None)
