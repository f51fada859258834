import gc

import pytest
import torch
from torch import UntypedStorage

from pipework.runtime import host_memory
from pipework.runtime.free_memory import HostAccount
from pipework.runtime.host_memory import HostMemory


def storages(*sizes: int) -> list[UntypedStorage]:
    return [torch.randint(256, (size,), dtype=torch.uint8).untyped_storage() for size in sizes]


def test_memories_lie_over_several_buffers_which_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "LARGEST", 2048)
    host = HostMemory(torch.device("cpu"), None, HostAccount())
    for sizes in ((5000, 1, 512, 513, 2048), (2048, 3000, 7), (1,), ()):
        before = storages(*sizes)
        expected = [each.clone() for each in before]
        stored = host.store(before)
        assert host.leaving == sum(sizes)
        for each in before:
            each.fill_(0)
        after, _ = host.fetch(stored)
        assert [bytes(each) for each in after] == [bytes(each) for each in expected]
        del stored
        assert host.reserved == 2048 * 4 + 1024 + 512 * (len(sizes) == 1 or not sizes)
    host.release()
    assert host.leaving == 0


def test_buffers_before_one_for_which_there_is_no_memory_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostMemory(torch.device("cpu"), None, HostAccount())
    monkeypatch.setattr(host_memory, "buffer_sizes", lambda _: [1024, -1])
    with pytest.raises(RuntimeError, match="negative dimension"):
        host.store(storages(2000))
    gc.collect()  # the error has the frames
    assert host.reserved == 1024


def test_as_many_buffers_are_kept_as_were_in_use_at_once() -> None:
    host = HostMemory(torch.device("cpu"), None, HostAccount())
    for count in (3, 1, 2, 3):
        all_at_once = [host.store(storages(600)) for _ in range(count)]
        assert host.reserved == 1024 * (3 - count)
        del all_at_once
        assert host.reserved == 3 * 1024
