"""Namespaces keep skip connections of the same name apart."""

from pipework.skip import Namespace

__all__ = ["Namespace"]
