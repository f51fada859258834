"""The fixtures of pipework's own tests that are used here."""

from tests.conftest import _assert_trained_alike, one_thread, seed

__all__ = ["_assert_trained_alike", "one_thread", "seed"]
