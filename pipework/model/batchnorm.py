"""Batch norm whose running statistics are those of the whole mini-batch, although it only sees micro-batches.

Each micro-batch is normalised with its own statistics, since the other micro-batches do not exist yet. Running
statistics that were updated for each of m micro-batches would decay m times as fast, and would miss the differences
between the micro-batches. So the statistics of the micro-batches are collected, and `commit` updates the running ones
once.

Of k groups of n_i values with means μ_i and sums of squared deviations M_i, the whole has

    n = Σ n_i        μ = Σ n_i μ_i / n        M = Σ M_i + Σ n_i (μ_i - μ)²

which is numerically stable, unlike Σx² - (Σx)²/n (Chan, Golub, LeVeque: Updating formulae and a pairwise algorithm for
computing sample variances, 1979; here for all groups at once).
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.lazy import LazyModuleMixin

from pipework.runtime.device import is_accelerator, record_on
from pipework.runtime.stage.recomputation import is_recomputing
from pipework.torch_private import BatchNorm

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


COLLECTED = ("sum", "sum_squares")
"""Buffers of the deferred batch norms of older libraries, which are not part of a model's state."""


@dataclass(frozen=True, eq=False)
class Moments:
    """Statistics of some values, for each channel.

    Attributes:
        count: the number of values of each channel.
        mean: their mean.
        deviations: the sum of their squared deviations from it.
    """

    count: int
    mean: Tensor
    deviations: Tensor


def merged(groups: Sequence[Moments]) -> Moments:
    """The moments of all values of several groups together.

    Example:
        >>> left, right = torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0], [7.0], [9.0]])
        >>> groups = [Moments(len(x), x.mean(0), x.var(0, correction=0) * len(x)) for x in (left, right)]
        >>> merged(groups)
        Moments(count=5, mean=tensor([5.]), deviations=tensor([40.]))
    """
    if len(groups) == 1:
        return groups[0]
    means = torch.stack([group.mean for group in groups])
    first, *others = [group.count for group in groups]
    # A tensor of counts makes the host wait for an accelerator, which a number does not.
    counts = first if {*others} == {first} else means.new_tensor([[first], *([count] for count in others)])
    total = sum(group.count for group in groups)
    mean = (means * counts).sum(0) / total
    within = torch.stack([group.deviations for group in groups]).sum(0)
    return Moments(total, mean, within + ((means - mean).square() * counts).sum(0))


class _Collected:
    """The statistics of the micro-batches of the current mini-batch. Shallow copies of a module share this object."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.moments: list[Moments] = []
        self.is_managed = False  # whether a pipe calls commit()

    def __getstate__(self) -> dict[str, Any]:
        with self.lock:
            return {"moments": list(self.moments), "is_managed": self.is_managed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, lock=threading.Lock())


class DeferredBatchNorm(BatchNorm):
    """Batch norm that normalises micro-batches, and updates its running statistics once for each mini-batch.

    The running mean, the running (unbiased) variance and `num_batches_tracked` are what `nn.BatchNorm1d`, `2d` or `3d`
    would have had from the whole mini-batch. In evaluation mode it is an ordinary batch norm.

    Inside a `Pipe` the update follows the forward of the last micro-batch. Elsewhere it follows every `chunks` forwards
    in training mode.

    Args:
        num_features: the number of channels, C in an input of shape (N, C, ...).
        eps: added to the variance before its root is taken.
        momentum: the weight of a mini-batch in the running statistics; None: all mini-batches weigh the same.
        affine: whether there are a weight and a bias to learn.
        chunks: the number of micro-batches of a mini-batch.
        device: the device of parameters and buffers.
        dtype: of parameters and buffers.
        bias: whether an affine one has a bias; PyTorch 2.11 has no batch norm without.

    Raises:
        ValueError: `chunks` is not a positive integer.

    Example:
        >>> batch = torch.randn(8, 3)
        >>> deferred, whole = DeferredBatchNorm(3, chunks=4), nn.BatchNorm1d(3)
        >>> for micro_batch in batch.chunk(4):
        ...     _ = deferred(micro_batch)
        >>> _ = whole(batch)
        >>> torch.testing.assert_close(deferred.running_var, whole.running_var)
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        chunks: int = 1,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        bias: bool = True,
    ) -> None:
        without = {} if bias else {"bias": False}  # which PyTorch 2.11 does not know
        super().__init__(num_features, eps, momentum, affine, True, device, dtype, **without)
        self._prepare(checked_chunks(chunks), BatchNorm)

    def _prepare(self, chunks: int, replaces: type[BatchNorm]) -> None:
        self.chunks = chunks
        self._replaces = replaces
        self._collected = _Collected()

    def forward(self, input: Tensor) -> Tensor:
        """Normalises one micro-batch; in training mode, keeps its statistics.

        Args:
            input: of shape (N, C, ...).
        """
        if not (self.training and self.track_running_stats and self.running_mean is not None):
            return super().forward(input)
        self._check_input_dim(input)
        # With momentum 1 the kernel replaces the running statistics by those of the micro-batch. It computes these in
        # any case, so the statistics cost no second pass over the input.
        mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_mean)
        output = functional.batch_norm(input, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        count = input.numel() // self.num_features
        if mean.dtype in (torch.float16, torch.bfloat16):
            self._collect(_moments_in_float32(input, count))
        else:
            self._collect(Moments(count, mean, variance * (count - 1)))
        return output

    @classmethod
    def convert_deferred_batch_norm(cls, module: nn.Module, chunks: int = 1) -> nn.Module:
        """Replaces all batch norms in a module; see the function of the same name."""
        return convert_deferred_batch_norm(module, chunks)

    def begin_mini_batch(self) -> None:
        """Discards the statistics of a mini-batch that failed. Until `commit`, forwards do not update by themselves."""
        self.discard(is_managed=True)

    def discard(self, *, is_managed: bool) -> None:
        """Discards the collected statistics; forwards update by themselves from now on, unless that is managed."""
        with self._collected.lock:
            self._collected.moments.clear()
            self._collected.is_managed = is_managed

    def commit(self) -> None:
        """Updates the running statistics with the collected ones, if there are any."""
        with self._collected.lock:
            self._collected.is_managed = False
            self._commit()

    def _collect(self, moments: Moments) -> None:
        # Two stages may run the same module at the same time. torch.compile does not trace the code inside the lock;
        # outside of it, it would compile the value of is_recomputing() in as a constant.
        with self._collected.lock:
            if is_recomputing():
                return
            self._collected.moments.append(moments)
            if not self._collected.is_managed and len(self._collected.moments) >= self.chunks:
                self._commit()

    @torch.no_grad()
    def _commit(self) -> None:
        groups = self._collected.moments
        if not groups:
            return
        mean, variance = self.running_mean, self.running_var
        assert mean is not None
        assert variance is not None
        weight = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                weight = 1.0 / float(self.num_batches_tracked)
        # A micro-batch without rows has no mean; and the module may have been moved since its first micro-batch.
        where = mean.device
        groups = [Moments(g.count, g.mean.to(where), g.deviations.to(where)) for g in groups if g.count]
        self._collected.moments.clear()
        if groups:
            if is_accelerator(where):
                # The workers' streams have allocated the statistics, and the caller's reads them.
                own = [tensor for group in groups for tensor in (group.mean, group.deviations)]
                record_on(torch.accelerator.current_stream(where), own)
            whole = merged(groups)
            mean.copy_((1 - weight) * mean + weight * whole.mean)
            variance.copy_((1 - weight) * variance + weight * (whole.deviations / (whole.count - 1)))

    def _check_input_dim(self, input: Tensor) -> None:
        if self._replaces is not BatchNorm:
            cast("Any", self._replaces)._check_input_dim(self, input)
        elif input.dim() < 2:
            raise ValueError(f"expected an input of 2 dimensions or more, (N, C, ...), got shape {tuple(input.shape)}")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        # torchgpipe and its descendants also saved the collected sums, which are zero between mini-batches.
        for name in COLLECTED:
            state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *others)

    def extra_repr(self) -> str:
        """What `repr` shows."""
        inherited: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{inherited}, chunks={self.chunks}"


def convert_deferred_batch_norm(module: nn.Module, chunks: int) -> nn.Module:
    """Replaces all batch norms that track statistics by deferred ones, at any depth and in place.

    `nn.SyncBatchNorm`, instance norms, subclasses with a forward of their own, and deferred batch norms for the same
    number of chunks stay as they are. Parameters and buffers stay the same objects; device, dtype, training flag and
    hooks are kept. A batch norm that occurs several times is replaced by one object.

    Args:
        module: the module to search; it may be a batch norm itself.
        chunks: the number of micro-batches of a mini-batch.

    Returns:
        The module, or its replacement.

    Raises:
        ValueError: `chunks` is not a positive integer, a lazy batch norm has no shape yet, or the module is a part of
            a model.

    Example:
        >>> module = convert_deferred_batch_norm(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)), chunks=8)
        >>> module[1].chunks
        8
    """
    checked_chunks(chunks)
    replacements = {
        id(found): _deferred(found, chunks)
        for found in module.modules()
        if isinstance(found, BatchNorm) and _is_to_be_replaced(found, chunks)
    }
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if id(child) in replacements:
                parent._modules[name] = replacements[id(child)]
    return replacements.get(id(module), module)


def doubt_about_statistics(module: nn.Module) -> str | None:
    """A text if batch norms in training mode would update their statistics for each micro-batch; None: there are none.

    Example:
        >>> doubt_about_statistics(nn.Sequential(nn.BatchNorm1d(2).eval())) is None
        True
    """
    found = [(name, each) for name, each in module.named_modules() if isinstance(each, BatchNorm) and each.training]
    if not found or any(isinstance(each, DeferredBatchNorm) for _, each in found):
        return None
    (name, first), *others = found
    more = f", and {len(others)} more" if others else ""
    return (
        f"batch norm in training mode ({name!r}, {type(first).__name__}{more}) normalises with the rows of its "
        "micro-batch, and updates its running statistics once for each micro-batch. No pipeline normalises with the "
        "whole mini-batch; deferred_batch_norm=True takes the running statistics from it, and False keeps all as it is "
        "without a warning"
    )


def _is_to_be_replaced(batch_norm: BatchNorm, chunks: int) -> bool:
    if isinstance(batch_norm, LazyModuleMixin) and batch_norm.has_uninitialized_params():
        raise ValueError(
            f"{type(batch_norm).__name__} has no shape yet: run the module once on a small batch before it is converted"
        )
    is_unit = hasattr(batch_norm, "unit_name")  # of a part, with another forward around that of its class
    if isinstance(batch_norm, DeferredBatchNorm):
        is_replaced = batch_norm.chunks != chunks
    else:
        is_ordinary = is_unit or type(batch_norm).forward is BatchNorm.forward
        is_replaced = is_ordinary and batch_norm.track_running_stats and batch_norm.running_mean is not None
    if is_replaced and is_unit:
        raise ValueError(
            "batch norms of a model that was cut already cannot be replaced: call "
            f"pipework.convert_deferred_batch_norm(model, {chunks}) before the model is cut"
        )
    return is_replaced


def _deferred(batch_norm: BatchNorm, chunks: int) -> nn.Module:
    """A deferred batch norm with all attributes, parameters, buffers and hooks of another batch norm."""
    deferred = DeferredBatchNorm.__new__(DeferredBatchNorm)
    deferred.__dict__.update(batch_norm.__dict__)
    deferred._prepare(chunks, batch_norm._replaces if isinstance(batch_norm, DeferredBatchNorm) else type(batch_norm))
    return deferred


def checked_chunks(chunks: int) -> int:
    """The number of micro-batches; raises a ValueError if it is not a positive integer."""
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise ValueError(f"number of chunks must be positive integer, got {chunks!r}")
    return chunks


@torch.no_grad()
def _moments_in_float32(input: Tensor, count: int) -> Moments:
    """The moments for batch norms of a 16-bit type, whose own statistics have too few digits to be merged."""
    dimensions = [dimension for dimension in range(input.dim()) if dimension != 1]
    variance, mean = torch.var_mean(input.float(), dimensions, correction=0)
    return Moments(count, mean, variance * count)


class DeferredBatchNorms:
    """The deferred batch norms of a pipe, which take turns over its mini-batches.

    Args:
        container: has them somewhere.

    Attributes:
        layers: the batch norms.
    """

    def __init__(self, container: nn.Module) -> None:
        self.layers = [module for module in container.modules() if isinstance(module, DeferredBatchNorm)]
        self._turn = threading.Lock()

    def collected(self) -> list[list[Moments]]:
        """What each of them has collected of the present mini-batch."""
        return [list(layer._collected.moments) for layer in self.layers]

    def collect(self, moments: Sequence[Sequence[Moments]]) -> None:
        """They have collected this in the present mini-batch."""
        for layer, own in zip(self.layers, moments, strict=True):
            layer._collected.moments[:] = own

    @contextlib.contextmanager
    def mini_batch(self, lock: threading.Lock) -> Iterator[None]:
        """They collect what passes inside, and commit it unless that fails.

        Args:
            lock: held while layers run: in a recomputation copies stand in for the running statistics.
        """
        with self._turn:  # another thread's mini-batch must not begin in between
            for layer in self.layers:
                layer.begin_mini_batch()
            try:
                yield
                with lock:
                    for layer in self.layers:
                        layer.commit()
            finally:
                for layer in self.layers:
                    layer.discard(is_managed=False)
