"""A connection to the store through which ranks communicate; no read waits until a key is written.

A store object serves one call at a time, so a thread that waits for a key would block all other users of the object.
`Store.add` is not used: if anything wrote text into such a key, the server would answer by closing the connection.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from torch.distributed.distributed_c10d import PrefixStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.distributed_c10d import Store

_NOTHING: Final = "?"  # no rank writes this
_TIMEOUT: Final = timedelta(seconds=1)


class StoreClient:
    """A connection to the server of a store.

    Args:
        store: whose server it connects to.

    Attributes:
        answered: how many requests have returned.

    Example:
        >>> from torch.distributed import HashStore
        >>> client = StoreClient(HashStore())
        >>> client.write("a", "1")
        >>> client.read_many(["a", "b"])
        [b'1', None]
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._connection = _connected(store)
        self._written: set[str] = set()
        self.answered = 0

    @property
    def address(self) -> str:
        """Of the server, for messages."""
        server = _server(self._store)
        return type(self._store).__name__ if server is None else f"{server[0]}:{server[1]}"

    def write(self, key: str, value: str) -> None:
        """Writes a key."""
        self._connection.set(key, value)
        self.answered += 1

    def read(self, key: str) -> bytes | None:
        """The value of a key at once; None if it has none.

        `compare_set` returns the value if the comparison fails, and what it compared with if there is no such key.
        """
        value: bytes = self._connection.compare_set(key, _NOTHING, _NOTHING)
        self.answered += 1
        return None if value == _NOTHING.encode() else value

    def read_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values of several keys: in one request, as soon as all of them were written."""
        if keys and self._written.issuperset(keys):
            values: list[bytes | None] = list(self._connection.multi_get(list(keys)))
            self.answered += 1
            return values
        values = [self.read(key) for key in keys]
        self._written.update(key for key, value in zip(keys, values, strict=True) if value is not None)
        return values

    def reconnect(self) -> None:
        """Makes a new connection. One that broke stays broken, even if the server runs."""
        server = _server(self._store)
        if server is not None:
            # The store itself would try until its own timeout, and write to standard error each time.
            socket.create_connection(server, timeout=_TIMEOUT.total_seconds()).close()
        self._connection = _connected(self._store)


def _connected(store: Store) -> Store:
    connection = store.clone() if hasattr(store, "clone") else store
    if connection is not store:
        connection.set_timeout(_TIMEOUT)
    return connection


def _server(store: Store) -> tuple[str, int] | None:
    """Where the server of a TCPStore listens; None: it is another kind of store."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return None if host is None or port is None else (str(host), int(port))
