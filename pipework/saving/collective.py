"""Collective work of the processes that save or load a checkpoint: they share results, and fail on all ranks or none.

Each process, or rank, holds some stages of the pipe. All ranks make every call.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pipework.backend import ProcessGroupView
    from pipework.pipe import Pipe

T = TypeVar("T")


def process_group_of(pipe: Pipe) -> ProcessGroupView:
    """The processes that hold a pipe.

    Raises:
        TypeError: `pipe` is no pipe.
    """
    if not isinstance(getattr(pipe, "partitions", None), list):
        inner = " (give its .module)" if hasattr(getattr(pipe, "module", None), "partitions") else ""
        raise TypeError(f"wanted a pipework.Pipe, got a {type(pipe).__name__}{inner}")
    return pipe.ranks


class RankResults(NamedTuple, Generic[T]):
    """Results of work on all ranks.

    Attributes:
        own: the result of this rank.
        shared: what each rank shared of its result, in the order of ranks.
    """

    own: T
    shared: list[Any]


def run_on_all_ranks(
    group: ProcessGroupView, action: str, work: Callable[[], T], share: Callable[[T], Any] = lambda result: None
) -> RankResults[T]:
    """Does work on every rank. If it fails on one, it fails on all, so that no rank waits for one that is gone.

    Args:
        group: the ranks.
        action: ends the message "rank 1 could not ...".
        work: of this rank.
        share: makes a JSON value of the work's result, which all ranks get.

    Raises:
        RuntimeError: the work of another rank failed.
        ValueError: another rank does other work, as in another call.
        BaseException: the work of this rank raised it.

    Example:
        >>> from pipework.backend import ProcessGroupView
        >>> run_on_all_ranks(ProcessGroupView(), "count", lambda: 3, share=lambda number: {"counted": number})
        RankResults(own=3, shared=[{'counted': 3}])
    """
    try:
        own = work()
        text = json.dumps({"action": action, "result": share(own)})
    except BaseException as error:  # also Ctrl-C: the program may catch it and go on
        group.all_gather_text(json.dumps({"action": action, "error": f"{type(error).__name__}: {error}"}))
        raise
    gathered = [json.loads(each) for each in group.all_gather_text(text)]
    for rank, each in zip(group.everyone, gathered, strict=True):
        if each["action"].split()[0] != action.split()[0]:  # what follows may be a path, which each machine has
            raise ValueError(f"rank {rank} is to {each['action']}, this one to {action}: make the same calls on all")
        if "error" in each:
            raise RuntimeError(f"rank {rank} could not {action}: {each['error']}")
    return RankResults(own, [each["result"] for each in gathered])


def write_in_parts(
    group: ProcessGroupView,
    what: str,
    path: Path,
    write: Callable[[Path], object],
    join: Callable[[list[Path]], object],
) -> None:
    """Writes a file from what several processes hold.

    Args:
        group: the processes, all of which call it.
        what: ends the message "rank 1 could not write ...".
        path: of the file. The part files lie beside it for a while.
        write: writes the part file of this process; called in the first replica only.
        join: writes the file from all part files; called in the first process only.
    """
    parts = [path.with_name(f"{path.name}.{rank}.tmp") for rank in range(len(group.everyone) // group.replicas)]

    def join_and_remove() -> None:
        join(parts)
        for part in parts:
            part.unlink()

    run_on_all_ranks(group, f"write {what}", lambda: None if group.replica else write(parts[group.rank]))
    run_on_all_ranks(group, f"join {what}", lambda: None if group.rank else join_and_remove())
