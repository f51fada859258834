"""A connection to the store through which ranks talk; no read waits for somebody to write.

A store object serves one call at a time, so a thread that waits for a key would hold up all other users of the object.
And `Store.add` is not used: if anybody wrote text into such a key, the server answers by closing the connection.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import PrefixStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.distributed_c10d import Store

_NOTHING: Final = "?"  # no rank writes this
_PATIENCE: Final = timedelta(seconds=1)


class StoreClient:
    """A connection to a store.

    Args:
        store: of whose server.
        own: makes a connection; else the store object itself is used, which is free but for the moment of a call.

    Attributes:
        answered: how many requests have come back.

    Example:
        >>> from torch.distributed import HashStore
        >>> client = StoreClient(HashStore())
        >>> client.write("a", "1")
        >>> client.read(["a", "b"])
        [b'1', None]
    """

    def __init__(self, store: Store, *, own: bool = True) -> None:
        self._store = store
        self._own = _connected(store) if own else store
        self._there: set[str] = set()
        self.answered = 0

    @property
    def address(self) -> str:
        """Of the server, for messages."""
        server = _server(self._store)
        return type(self._store).__name__ if server is None else f"{server[0]}:{server[1]}"

    def write(self, key: str, value: str) -> None:
        """Sets a key."""
        self._own.set(key, value)
        self.answered += 1

    def look(self, key: str) -> bytes | None:
        """The value of a key, None if it has none, at once.

        A comparison that fails tells the value, and one with a key that is not there tells what it was compared with.
        """
        value: bytes = self._own.compare_set(key, _NOTHING, _NOTHING)
        self.answered += 1
        return None if value == _NOTHING.encode() else value

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values of several keys: in one request, once all of them were there."""
        if keys and self._there.issuperset(keys):
            try:
                values: list[bytes | None] = list(self._own.multi_get(list(keys)))
                self.answered += 1
                return values
            except DistStoreError:  # one of them was deleted, so that this took until the timeout
                self._there.clear()
        looked = [self.look(key) for key in keys]
        self._there.update(key for key, value in zip(keys, looked, strict=True) if value is not None)
        return looked

    def reconnect(self) -> None:
        """Connects anew. A connection that broke stays broken, also if the server lives."""
        server = _server(self._store)
        if server is not None:
            # The store itself would try for as long as its timeout is, and tell standard error each time.
            socket.create_connection(server, timeout=_PATIENCE.total_seconds()).close()
        self._own = _connected(self._store)


def _connected(store: Store) -> Store:
    own = store.clone() if hasattr(store, "clone") else store
    if own is not store:
        own.set_timeout(_PATIENCE)
    return own


def _server(store: Store) -> tuple[str, int] | None:
    """Where the server of a TCPStore listens; None: it is another kind of store."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return None if host is None or port is None else (str(host), int(port))
