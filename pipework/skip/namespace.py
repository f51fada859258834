"""Namespaces for skip connections of the same name."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field


@dataclass(frozen=True, order=True, slots=True)
class Namespace:
    """Distinguishes the skip connections of some layers from others of the same name.

    Each new namespace differs from all others, also from those of other processes. Copies of a namespace equal it, so
    the layers of a copied or unpickled model stay connected. Namespaces are hashable and ordered.

    Example:
        >>> import copy
        >>> namespace = Namespace()
        >>> namespace == Namespace(), namespace == copy.deepcopy(namespace)
        (False, True)
    """

    identity: str = field(default_factory=lambda: uuid.uuid4().hex, init=False)


SkipKey = tuple[Namespace | None, str]
"""Identifies a skip connection: its namespace (None without `isolate`) and its name."""
