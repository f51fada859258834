"""Notices glue that computes with values that are not here, as it did not for the sample.

The glue of a part gets tensors without values in place of those that it needs for the sample's way through the forward
for their shapes alone. If the forward takes another way, it may use one of them, and what it computes would be wrong
without an error. So in some runs every operator of the glue is watched, as the dry run watched it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipework import torch_private
from pipework.model.parts.execution.leaves import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pipework.model.parts.execution.run import PartRun


class AbsenceWatch(torch_private.ThreadDispatchMode):
    """Marks what is computed from tensors without values as such, too; units are not watched.

    Args:
        run: of the part.
    """

    def __init__(self, run: PartRun) -> None:
        super().__init__()
        self._run = run

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operator.

        Raises:
            RuntimeError: the forward reads a value that is not here.
        """
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._run.lacks_any(tensors_in((args, kwargs))):
            made = tensors_in(result)
            if not made:  # a number
                raise self._run.reads_absent()
            self._run.mark_absent((*made, *torch_private.written_arguments(func, args, kwargs)))
        return result

    def outside(self, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """Calls a function that is not watched: no operator of it may run otherwise than in other steps."""
        self.__exit__(None, None, None)
        try:
            return function(*arguments, **keywords)
        finally:
            self.__enter__()
