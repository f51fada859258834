"""What units change in place, in a dry run: the forward may read it afterwards, or what it was before, but not both.

A message holds such a tensor as it is in the end. A later part that computes from it again what the forward has
computed before the change would get something else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pipework.model.parts.analysis.refusal import CannotCut
from pipework.model.parts.execution.plan import Source

if TYPE_CHECKING:
    from collections.abc import Collection


class _Change(NamedTuple):
    """One change.

    Attributes:
        before: the tensor until then; None: the forward itself has computed it.
        after: the tensor from then on.
        position: of the call that changes it.
    """

    before: Source | None
    after: Source
    position: int


class ChangesInPlace:
    """The changes in one dry run.

    Args:
        model: its class, as messages call it.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._origins: dict[int, Source] = {}
        self._changes: list[_Change] = []

    def given(self, memory: int, source: Source) -> None:
        """Notes that a tensor is an input, or what a unit has given."""
        self._origins[memory] = source

    def note(self, memory: int, call: str, position: int) -> Source:
        """Notes that a call changes a tensor; returns what is to be followed from now on."""
        after = Source("changed", call, len(self._changes))
        self._changes.append(_Change(self._origins.get(memory), after, position))
        self._origins[memory] = after
        return after

    def merged(
        self, uses: dict[Source, set[float]], changed_by_glue: Collection[str]
    ) -> dict[Source, frozenset[float]]:
        """The uses of all tensors, with those after a change as uses of what was changed.

        Args:
            uses: see `Trace`.
            changed_by_glue: the calls whose results the forward itself changes in place.

        Raises:
            CannotCut: another part would read something else.
        """
        found = {source: set(positions) for source, positions in uses.items()}
        for before, after, position in reversed(self._changes):
            read = found.pop(after, set())
            name = after.name
            if before is None or before.name in changed_by_glue:
                if read:
                    raise CannotCut(
                        f"{name} changes in place what {self._model}'s forward has computed or changed outside of the "
                        "units, and the forward reads that again: use what the unit returns, or compute a new tensor "
                        "there (inplace=False)"
                    )
                continue
            if any(use > position for use in found.get(before, ())):
                raise CannotCut(
                    f"{name} changes in place what {before.name} gave, and {self._model}'s forward uses later what it "
                    "has computed from that before: compute a new tensor there (inplace=False)"
                )
            if read:
                found.setdefault(before, set()).update(read)
        return {source: frozenset(positions) for source, positions in found.items()}
