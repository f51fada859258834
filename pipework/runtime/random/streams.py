"""Random streams by (key, layer, micro-batch): the same numbers on any worker, and in a recomputation.

A training call draws one 64-bit key from the caller's generator, which `torch.manual_seed` sets. Each layer has a
stream of its own for each micro-batch, seeded with the key, the layer's index in the un-partitioned module and the
micro-batch. So a dropout mask is the same for any number of stages, any schedule and any order of execution, and when
recomputed.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
from torch import nn

from pipework import torch_private
from pipework.runtime.random import kernels

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipework.runtime.random.kernels import DeviceGenerator, State
    from pipework.runtime.random.unseen_draws import Hold

_MASK = (1 << 64) - 1
_INSIDE = 1 << 32  # above the numbers of layers

# Modules of torch.nn that draw nothing. All others (a user's class, a dropout, a module with hooks) may draw. A module
# that is listed wrongly gets masks that cannot be reproduced; one that is missing costs a microsecond.
_NEVER_DRAW = (
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Identity, nn.Flatten, nn.Unflatten,
    nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag,
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.LocalResponseNorm,
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.GLU,
    nn.Sigmoid, nn.LogSigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.Softmax, nn.LogSoftmax, nn.Hardtanh,
    nn.Hardswish, nn.Hardsigmoid, nn.Upsample, nn.PixelShuffle, nn.PixelUnshuffle,
    nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d,
)  # fmt: skip
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def may_draw(layer: nn.Module) -> bool:
    """Whether the layer may draw random numbers when it runs; False only if it certainly draws none.

    Example:
        >>> may_draw(nn.Sequential(nn.Linear(2, 2), nn.ReLU())), may_draw(nn.Dropout(0.1)), may_draw(nn.Dropout(0.0))
        (False, True, False)
    """
    for module in layer.modules():
        if torch_private.may_have_forward_hooks(module) or "forward" in module.__dict__:
            return True
        if type(module) in DROPOUTS:
            if getattr(module, "p", 1) > 0:
                return True
        elif type(module) not in _NEVER_DRAW:
            return True
    return False


def function_may_draw(function: Callable[..., object] | None) -> bool:
    """Whether a loss function may draw random numbers.

    Example:
        >>> function_may_draw(nn.functional.cross_entropy), function_may_draw(lambda output, target: output.mean())
        (False, True)
    """
    if isinstance(function, nn.Module):
        return not type(function).__module__.startswith("torch.nn.modules.loss") and may_draw(function)
    return function is not None and getattr(function, "__module__", "") != nn.functional.__name__


def draw_key() -> int:
    """One 64-bit draw from the caller's default CPU generator."""
    drawn = torch.empty((), dtype=torch.int64, device="cpu")
    if kernels.thread_stream.stream is None:  # else the caller is a layer of a pipe, and draws from its own stream
        torch_private.random_on_cpu(drawn)
    else:
        drawn.random_()
    return int(drawn)


class Key:
    """The key of one call, drawn when it is first read.

    A training call reads it at once. An evaluation call leaves the caller's generator alone unless a layer draws.
    """

    __slots__ = ("_lock", "_value")

    def __init__(self, value: int | None = None) -> None:
        self._value = value
        self._lock = threading.Lock()

    @property
    def drawn(self) -> bool:
        """Whether the key has been drawn already, as it is for every training call."""
        return self._value is not None

    def value(self) -> int:
        """The 64-bit key."""
        with self._lock:
            if self._value is None:
                stream = kernels.thread_stream.stream
                if stream is not None and stream.key is self:
                    # The worker is inside a layer. Without its stream, the draw comes from the caller's generator; with
                    # it, the draw would need this key. A pipe that a layer calls draws from the layer's stream.
                    with kernels.drawing_from(None):
                        self._value = draw_key()
                else:
                    self._value = draw_key()
            return self._value


class RandomStream:
    """The source of one thread's random numbers; it starts anew at each (layer, micro-batch).

    `enter` only notes layer and micro-batch, since most layers draw nothing. The first draw seeds a generator.

    Args:
        key: of this call.

    Attributes:
        key: as above.
        moves_generators: whether accelerators draw from this stream, too. In evaluation they draw from their default
            generators as they are, so that what they draw is remembered.
        holds: with which the worker holds the generators of devices at present.
    """

    __slots__ = ("_generator", "_on_devices", "_place", "_seeded", "holds", "key", "moves_generators")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.moves_generators = key.drawn
        self.holds: dict[DeviceGenerator, Hold] = {}
        self._place = -1, -1
        self._seeded: tuple[int, int] | None = None  # the very place for which the generator was seeded
        self._generator: torch.Generator | None = None
        self._on_devices: dict[DeviceGenerator, tuple[tuple[int, int], State]] = {}  # likewise, on accelerators

    def enter(self, layer: int, micro_batch: int) -> None:
        """Starts the stream of this layer and micro-batch."""
        self._place = layer, micro_batch
        for generator, hold in self.holds.items():
            hold.move(generator.seeded(self.seed()))

    @property
    def is_captured(self) -> bool:
        """Whether what this thread launches is captured as a graph."""
        return False

    @property
    def micro_batch(self) -> int:
        """The number of the present micro-batch."""
        return self._place[1]

    def enter_inside(self, number: int) -> None:
        """Starts the stream of a module inside of a layer; see `streams_inside`."""
        self.enter(_INSIDE + number, self._place[1])

    def seed(self) -> int:
        """The 64-bit seed of the present (key, layer, micro-batch)."""
        return mix(self.key.value(), *self._place)

    def generator(self) -> torch.Generator:
        """The generator to draw the next CPU numbers from."""
        if self._generator is None:
            self._generator = torch.Generator("cpu")
        if self._seeded is not self._place:
            self._generator.manual_seed(self.seed())
            self._seeded = self._place
        return self._generator

    def accessed(self) -> torch.Generator:
        """The generator whose state a layer reads or replaces."""
        return self.generator()

    def state_on(self, device: DeviceGenerator) -> State:
        """The state from which an accelerator draws next."""
        place, state = self._on_devices.get(device, (None, ()))
        return state if place is self._place else device.seeded(self.seed())

    def keep_state_on(self, device: DeviceGenerator, state: State) -> None:
        """Notes the state that an accelerator has left."""
        self._on_devices[device] = self._place, state


def micro_batch_here() -> int:
    """Inside of a layer: the number of the present micro-batch, for which this thread draws its numbers; else -1."""
    stream = kernels.thread_stream.stream
    return -1 if stream is None else stream.micro_batch


def streams_inside() -> Callable[[int], None] | None:
    """Inside of a layer: what starts the stream of one of the modules in it, for the present micro-batch.

    So its numbers do not depend on which modules are in the layer. It takes the number of the module, which has nothing
    to do with those of layers. None: there is no stream.
    """
    stream = kernels.thread_stream.stream
    return None if stream is None else stream.enter_inside


def has_random_state(layer: nn.Module) -> bool:
    """Whether a layer's dropout has a state of its own on accelerators, as that of cuDNN's recurrent layers.

    Example:
        >>> has_random_state(nn.LSTM(2, 2, num_layers=2, dropout=0.1)), has_random_state(nn.Dropout(0.1))
        (True, False)
    """
    return any(isinstance(module, nn.RNNBase) and module.dropout > 0 for module in layer.modules())


def mix(key: int, layer: int, micro_batch: int) -> int:
    """A 64-bit seed; neighbouring arguments have unrelated seeds.

    SplitMix64's finalizer (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014) after each
    argument.

    Example:
        >>> mix(1, 2, 3) == mix(1, 2, 3), mix(1, 2, 3) == mix(1, 3, 2)
        (True, False)
    """
    state = key & _MASK
    for word in (layer, micro_batch):
        state = (state + 0x9E3779B97F4A7C15 * (word + 1)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state
