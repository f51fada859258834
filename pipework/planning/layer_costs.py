"""What a profile says of each layer, kind of device and link."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple


class LayerInfo(NamedTuple):
    """What a layer is, and the bytes that it has on whatever device holds it.

    Attributes:
        name: in its model.
        type: the name of its class.
        weights: bytes of its parameters.
        trained: bytes of those that are trained; their gradients have as many.
        buffers: bytes of its buffers.
    """

    name: str
    type: str
    weights: int
    trained: int
    buffers: int


class LayerSeconds(NamedTuple):
    """The seconds of a layer for one micro-batch.

    Attributes:
        forward: of ``F``, and of ``R``.
        input_gradient: of ``I``; of all of ``B`` where the layer's backward cannot be split.
        weight_gradient: of ``W``.
    """

    forward: float
    input_gradient: float
    weight_gradient: float

    @classmethod
    def median(cls, found: Iterable[Sequence[float]]) -> LayerSeconds:
        """The medians of times that were measured several times.

        Example:
            >>> LayerSeconds.median([(1, 3, 0), (9, 1, 0), (2, 2, 0)])
            LayerSeconds(forward=2, input_gradient=2, weight_gradient=0)
        """
        return cls(*map(median, zip(*found, strict=True)))


class LayerBytes(NamedTuple):
    """The bytes of a layer for one micro-batch.

    Attributes:
        input: what it is given.
        kept: what its graph holds beside input and output.
        output_kept: what its output adds to that, while a next layer on the same stage needs it.
        output: what it sends to a next stage.
        waiting: what is kept between ``I`` and ``W``.
        temporary: the most that one of its actions needs beside all that.
        saves_input: 1 if its graph holds its input, else 0.
        stays: how much of `kept` stays on the device if activations are offloaded.
    """

    input: int
    kept: int
    output_kept: int
    output: int
    waiting: int
    temporary: int
    saves_input: int = 1
    stays: int = 0


@dataclass(frozen=True)
class DeviceKind:
    """The times of all layers on one kind of device.

    Attributes:
        seconds: for each number of rows of the profile, those of each layer.
        memory: the bytes that a device of this kind has; None: unknown.
        estimated: whether times are computed from operations and bytes, and not measured.
        host: the link to the host's memory, each way, over which activations go if they are offloaded; None: unknown.
    """

    seconds: tuple[tuple[LayerSeconds, ...], ...]
    memory: int | None = None
    estimated: bool = False
    host: LinkSpeed | None = None


class LinkSpeed(NamedTuple):
    """How fast values go from one kind of device to another.

    Attributes:
        latency: seconds of an empty message.
        bytes_per_second: of a large one.
    """

    latency: float
    bytes_per_second: float

    def seconds(self, size: float) -> float:
        """The time of a message.

        Example:
            >>> LinkSpeed(1e-3, 1e6).seconds(1000)
            0.002
        """
        return self.latency + size / self.bytes_per_second


class SkipBytes(NamedTuple):
    """A skip connection: the layers between which it goes, and its bytes for each number of rows of the profile."""

    source: int
    target: int
    size: tuple[int, ...]


class MicroBatchProfile(NamedTuple):
    """A profile for micro-batches of one size.

    Attributes:
        seconds: by kind of device, those of each layer.
        bytes: of each layer.
        skips: bytes of each skip connection.
    """

    seconds: Mapping[str, tuple[LayerSeconds, ...]]
    bytes: tuple[LayerBytes, ...]
    skips: tuple[int, ...]
