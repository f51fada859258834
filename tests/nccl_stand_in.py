"""A group of gloo with the ways of NCCL's: transfers have no tags, and start in batches."""

from typing import Any


class NcclStandIn:
    """Two ranks. A transfer that is started by itself fails, as NCCL warns of it."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._batch: list[Any] | None = None

    def rank(self) -> int:
        return self._group.rank()

    def _start_coalescing(self) -> None:
        assert self._batch is None
        self._batch = []

    def _end_coalescing(self) -> "Together":
        batch, self._batch = self._batch, None
        assert batch, "an empty batch has no work"
        return Together(batch)

    def send(self, tensors: list[Any], destination: int, tag: int) -> None:
        self._start("send", tensors, destination, tag)

    def recv(self, tensors: list[Any], source: int, tag: int) -> None:
        self._start("recv", tensors, source, tag)

    def _start(self, operation: str, tensors: list[Any], *place: int) -> None:
        assert self._batch is not None, "An unbatched P2P op (send/recv) was called"
        self._batch.append(getattr(self._group, operation)(tensors, *place))


class Together:
    """The transfers of a batch."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
