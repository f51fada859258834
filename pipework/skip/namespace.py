"""Namespaces: they keep skip connections of the same name apart."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field


def _unique() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True, order=True, slots=True)
class Namespace:
    """Sets the skip connections of some layers apart from others of the same name.

    Each new namespace differs from all others, those of other processes included. Its copies equal it, so that a copied
    or unpickled model has its layers still connected. Namespaces can be keys of a dict, and have an order.

    Example:
        >>> import copy
        >>> namespace = Namespace()
        >>> namespace == Namespace(), namespace == copy.deepcopy(namespace)
        (False, True)
    """

    identity: str = field(default_factory=_unique, init=False)


SkipKey = tuple[Namespace | None, str]
"""What identifies a skip connection: its namespace, None if it was not isolated, and its name."""
