"""What units give beside what they return, such as the router logits that hooks of transformers collect."""

from __future__ import annotations

from typing import Any, Protocol


class SideOutputs(Protocol):
    """Lists to which hooks of units append while a forward runs."""

    def mark(self) -> Any:
        """Where the lists end now; false where nothing is collected."""

    def since(self, mark: Any) -> dict[str, list[Any]]:
        """What has been appended after a mark, by list."""

    def add(self, items: dict[str, list[Any]]) -> None:
        """Appends what a unit of another part has given."""

    def remove(self, mark: Any) -> None:
        """Takes away what has been appended after a mark."""


class NoSideOutputs:
    """Units give what they return, and nothing else."""

    def mark(self) -> None:
        """See `SideOutputs.mark`."""

    def since(self, mark: None) -> dict[str, list[Any]]:
        """See `SideOutputs.since`."""
        return {}

    def add(self, items: dict[str, list[Any]]) -> None:
        """See `SideOutputs.add`."""

    def remove(self, mark: None) -> None:
        """See `SideOutputs.remove`."""
