"""Several processes that save or load together: they say one thing to each other, and fail together.

A process is called a rank here. Each holds some stages of the pipe, and every call is collective.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipework.pipe import Pipe

T = TypeVar("T")


class Ranks(Protocol):
    """The processes, as one of them sees them.

    Attributes:
        rank: its number.
        size: how many there are.
        replica: which of several equal pipes it belongs to. Only those of replica 0, rank 0 among them, write stages.
        replicas: how many there are; their ranks are numbered replica by replica.
        everyone: the number of each in the job, for messages.
    """

    rank: int
    size: int
    replica: int
    replicas: int
    everyone: Sequence[int]

    def all_gather_text(self, text: str) -> list[str]:
        """What each rank said, in order; every rank waits here for all others."""
        ...


class OneProcess:
    """A process that holds the whole pipe."""

    rank = 0
    size = 1
    replica = 0
    replicas = 1
    everyone: Sequence[int] = (0,)

    def all_gather_text(self, text: str) -> list[str]:
        """Its own words."""
        return [text]


class Seat(NamedTuple):
    """Which of the workers of which of the replicas a rank is."""

    worker: int
    workers: int
    replica: int
    replicas: int

    @classmethod
    def of(cls, ranks: Ranks) -> Self:
        """Of a rank.

        Example:
            >>> Seat.of(OneProcess())
            Seat(worker=0, workers=1, replica=0, replicas=1)
        """
        workers = ranks.size // ranks.replicas
        return cls(ranks.rank - workers * ranks.replica, workers, ranks.replica, ranks.replicas)


def ranks_of(pipe: Pipe) -> Ranks:
    """The processes that hold a pipe."""
    # What is no pipe at all is refused, with a better message, where its stages are asked for.
    return getattr(pipe, "ranks", None) or OneProcess()


class Together(NamedTuple, Generic[T]):
    """What all ranks did.

    Attributes:
        mine: what this one's work gave.
        said: what each rank said of its own.
    """

    mine: T
    said: list[Any]


def together(
    ranks: Ranks, what: str, work: Callable[[], T], say: Callable[[T], Any] = lambda done: None
) -> Together[T]:
    """Does work on every rank; if it fails on one, it fails on all, so that none waits for a rank that is gone.

    Args:
        ranks: who works.
        what: to end "rank 1 could not ..." with.
        work: of this rank.
        say: from what the work gave to what the other ranks should know of it, a JSON value.

    Raises:
        RuntimeError: the work of another rank failed.
        Exception: what this rank's own work raised.

    Example:
        >>> together(OneProcess(), "count", lambda: 3, say=lambda number: {"counted": number})
        Together(mine=3, said=[{'counted': 3}])
    """
    try:
        mine = work()
        word = json.dumps({"said": say(mine)})
    except Exception as error:
        ranks.all_gather_text(json.dumps({"failed": f"{type(error).__name__}: {error}"}))
        raise
    words = [json.loads(word) for word in ranks.all_gather_text(word)]
    for rank, each in enumerate(words):
        if "failed" in each:
            raise RuntimeError(f"rank {ranks.everyone[rank]} could not {what}: {each['failed']}")
    return Together(mine, [each["said"] for each in words])
