"""All processes of a pipe and its replicas, for what they do together beside training, such as saving a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipework.processes.company import Company
    from pipework.runtime.workers import Workers


class Ranks:
    """The processes, as one of them sees them.

    Args:
        company: this process among the others.
        workers: of this process.

    Attributes:
        rank: its number, replica by replica.
        size: how many there are.
        replica: which of several equal pipes it belongs to.
        replicas: how many there are.
        everyone: the number of each in the job, for messages.
    """

    def __init__(self, company: Company, workers: Workers) -> None:
        self._company = company
        self._workers = workers
        self.rank = company.everyone.index(company.mesh.rank)
        self.size = len(company.everyone)
        self.everyone = company.everyone
        self.replica = company.mesh.data_parallel_rank
        self.replicas = company.mesh.data_parallel_size

    def all_words(self, text: str) -> list[str]:
        """What each process said, in order; every one waits here for all others.

        Raises:
            PipelineError: another process has failed.
        """
        with self._company.calling("checkpoint"):
            self._company.faults.strike("save")
            return self._company.all_words(self._workers, text)
