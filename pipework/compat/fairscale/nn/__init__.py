"""The adapter for `fairscale.nn`, of which it has `Pipe` alone."""

from pipework.compat.fairscale.nn.pipe import Pipe

__all__ = ["Pipe"]


_OTHERS = frozenset(
    (
        "FlattenParamsWrapper",
        "FullyShardedDataParallel",
        "MOELayer",
        "PipeRPCWrapper",
        "ShardedDataParallel",
        "Top2Gate",
        "auto_wrap",
        "checkpoint_wrapper",
        "config_auto_wrap_policy",
        "default_auto_wrap_policy",
        "enable_wrap",
        "wrap",
    )
)  # the names that fairscale has there


def __getattr__(name: str) -> object:
    if name not in _OTHERS:
        raise AttributeError(f"module 'fairscale.nn' has no attribute {name!r}")
    # An AttributeError would become "cannot import name", without the hint.
    raise ImportError(
        f"fairscale.nn has no {name!r} here: pipework replaces fairscale's Pipe alone; for the rest install "
        "fairscale, of which only Pipe is then replaced"
    )
