"""What this rank is doing now: its hot loop writes it without locks, and the threads of its monitor read it."""

from __future__ import annotations


class Progress:
    """Plain attributes: setting two of them for each action costs some tens of nanoseconds.

    Attributes:
        action: what runs now, any object; it becomes text only when a heartbeat or a message needs it.
        count: another number for every action.
        waiting: whether the rank waits for another one, rather than computing.

    Example:
        >>> progress = Progress()
        >>> progress.action = "optimizer"
        >>> progress.count += 1
        >>> with progress.waits():
        ...     progress.waiting
        True
    """

    __slots__ = ("action", "count", "waiting")

    def __init__(self) -> None:
        self.action: object = None
        self.count = 0
        self.waiting = False

    def waits(self) -> Progress:
        """A context in which the rank waits for other ranks."""
        return self

    def __enter__(self) -> None:
        self.waiting = True

    def __exit__(self, *_: object) -> None:
        self.waiting = False
