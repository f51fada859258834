"""All processes of a pipe and its replicas, for what they do together beside training, such as saving a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipework.distributed.peer_group import PeerGroup
    from pipework.runtime.worker_threads import WorkerThreads


class Ranks:
    """The processes, as one of them sees them.

    Args:
        peer_group: this process among the others.
        workers: of this process.

    Attributes:
        rank: its number, replica by replica.
        size: how many there are.
        replica: which of several equal pipes it belongs to.
        replicas: how many there are.
        everyone: the number of each in the job, for messages.
    """

    def __init__(self, peer_group: PeerGroup, workers: WorkerThreads) -> None:
        self._peer_group = peer_group
        self._workers = workers
        self.rank = peer_group.everyone.index(peer_group.mesh.rank)
        self.size = len(peer_group.everyone)
        self.everyone = peer_group.everyone
        self.replica = peer_group.mesh.data_parallel_rank
        self.replicas = peer_group.mesh.data_parallel_size

    def all_words(self, text: str) -> list[str]:
        """What each process said, in order; every one waits here for all others.

        Raises:
            PipelineError: another process has failed.
        """
        with self._peer_group.calling("checkpoint"):
            self._peer_group.faults.strike("save")
            return self._peer_group.all_words(self._workers, text)
