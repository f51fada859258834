"""One file of the tensors of several processes: each writes a part file, and the first process joins them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipework.saving.collective import run_on_all_ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pipework.backend import ProcessGroupView


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
        if group.rank == 0:
            join(parts)
            for part in parts:
                part.unlink()

    run_on_all_ranks(group, f"write {what}", lambda: None if group.replica else write(parts[group.rank]))
    run_on_all_ranks(group, f"join {what}", join_and_remove)
