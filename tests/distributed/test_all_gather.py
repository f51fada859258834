"""All-gather of bytes."""

from typing import Any

import pytest
from torch import Tensor

from pipework.distributed.all_gather import all_gather
from pipework.distributed.transport.channel import LostConnectionError


class _Sent:
    def wait(self) -> None:
        pass


class _Group:
    """Three ranks, of which this is the second; no transfer to or from one of them works.

    Args:
        gone: that rank.
        sends: whether its end is not known yet, so that only receiving fails.
    """

    def __init__(self, gone: int, *, sends: bool) -> None:
        self._gone = gone
        self._sends = sends

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 3

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> Any:
        return self._transfer(destination, fails=not self._sends)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        tensors[0].fill_(1)
        return self._transfer(source, fails=True)

    def abort(self) -> None:
        pass

    def _transfer(self, rank: int, *, fails: bool) -> _Sent:
        if fails and rank == self._gone:
            raise RuntimeError("Connection closed by peer")
        return _Sent()


@pytest.mark.parametrize("sends", [False, True])
@pytest.mark.parametrize("gone", [0, 2])
def test_a_lost_rank_is_named(gone: int, sends: bool) -> None:
    with pytest.raises(LostConnectionError) as caught:
        all_gather(_Group(gone, sends=sends), [7, 8, 9], b"text")
    assert caught.value.rank == 7 + gone
