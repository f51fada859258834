"""Reads that never wait, and connections that are made again."""

from datetime import timedelta

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from pipework.distributed.health.store_client import StoreClient


def test_a_key_that_was_never_written_is_read_at_once(store: TCPStore) -> None:
    client = StoreClient(PrefixStore("test", store))
    assert client.read("a") is None  # a request that waits would raise an error after the timeout
    assert client.read_many(["a", "b"]) == [None, None]
    client.write("b", "?")  # text as any other, except as the whole value
    client.write("b", "1")
    assert client.read_many(["a", "b"]) == [None, b"1"]
    assert client.answered == 7


def test_several_keys_take_one_request_once_all_were_written(store: TCPStore) -> None:
    client = StoreClient(store)
    for key in "ab":
        client.write(key, key)
    client.read_many("ab")
    before = client.answered
    assert client.read_many("ab") == [b"a", b"b"]
    assert client.answered == before + 1
    assert client.read_many([]) == []


def test_addresses(store: TCPStore) -> None:
    assert StoreClient(PrefixStore("test", store)).address == f"127.0.0.1:{store.port}"
    assert StoreClient(HashStore()).address == "HashStore"


def test_reconnecting() -> None:
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    client = StoreClient(store)
    client.write("a", "1")
    client.reconnect()
    assert client.read("a") == b"1"
    other = StoreClient(TCPStore("127.0.0.1", store.port, None, False, timedelta(seconds=30), wait_for_workers=False))
    del client, store
    with pytest.raises(OSError, match="refused"):
        other.reconnect()
