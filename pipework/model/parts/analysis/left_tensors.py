"""Tensors that a unit leaves in a list, a dict or an object that the forward has given it.

Each part makes such an object anew, so that what a unit of another part has left there would be missing. A cache in
which each unit finds only what it has left itself is no harm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipework.model.parts.analysis.refusal import CannotCut
from pipework.model.parts.execution.leaves import held_by

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


class LeftTensors:
    """What units have left in a dry run.

    Args:
        model: its class, as messages call it.

    Attributes:
        calling: the call of a unit whose operators run at present; "": the glue's.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._left: dict[int, tuple[str, Tensor]] = {}
        self.calling = ""

    def note(self, before: list[Tensor], given: Any, own: Any) -> None:
        """Notes what the present call has left.

        Args:
            before: the tensors in what it was given.
            given: what it was given: the objects of the forward, in copies of its lists and dicts.
            own: what the forward gave.

        Raises:
            CannotCut: it was a list or a dict.
        """
        known, shared = {id(tensor) for tensor in before}, {id(tensor) for tensor in held_by(own)}
        for tensor in held_by(given):
            if id(tensor) not in known:
                self._left[id(tensor)] = self.calling, tensor
                if id(tensor) not in shared:
                    raise self._error(self.calling)

    def refuse_reading(self, tensors: Iterable[Tensor]) -> None:
        """Raises a CannotCut if another unit, or the glue, reads what a unit has left."""
        for tensor in tensors:
            call, _ = self._left.get(id(tensor), (self.calling, None))
            if call != self.calling:
                raise self._error(call)

    def __bool__(self) -> bool:
        return bool(self._left)

    def _error(self, call: str) -> CannotCut:
        return CannotCut(
            f"{call} puts a tensor into a list, dict or object that {self._model}'s forward hands it, and each part "
            "makes its own: return the tensor, or let one unit hold all modules that use it"
        )
