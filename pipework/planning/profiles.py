"""A profile: the seconds and bytes of each layer, for several sizes of a micro-batch and kinds of device."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pipework.planning.candidate import Candidate
from pipework.planning.json_file import SavedAsJson, check_numbers
from pipework.planning.layer_costs import (
    DeviceKind,
    LayerBytes,
    LayerInfo,
    LayerSeconds,
    LinkSpeed,
    MicroBatchProfile,
    SkipBytes,
)
from pipework.planning.request import make_request
from pipework.schedule import Schedule, build, with_recompute
from pipework.schedule.argument_checks import checked_tuple, one_of, positive_integers
from pipework.schedule.draw.units import memory_text
from pipework.schedule.edges import recomputed

if TYPE_CHECKING:
    from pipework.planning.plan import Plan


@dataclass(frozen=True)
class Profile(SavedAsJson):
    """Seconds and bytes of a model's layers.

    Attributes:
        batch: the rows of the mini-batch.
        rows: the rows of the micro-batches that were measured, in ascending order.
        layers: in their order.
        bytes: for each number of rows, those of each layer.
        kinds: by name, the kinds of device on which layers were measured.
        devices: the kind of each device that is known by a name of its own, such as "cuda:0".
        links: by the kinds of sender and receiver; a link that is missing takes no time.
        skips: the skip connections.
        loss_inside: whether the loss was part of the last layer's measurement.

    Raises:
        TypeError: a number of rows is no integer.
        ValueError: lengths or names do not fit together, or a number is negative, infinite or NaN.

    Example:
        >>> from pipework.planning.layer_costs import *
        >>> layer = LayerInfo("0", "Linear", weights=80, trained=80, buffers=0)
        >>> times = DeviceKind(seconds=((LayerSeconds(1, 1, 1),), (LayerSeconds(1.5, 2, 2),)))
        >>> sizes = ((LayerBytes(8, 8, 8, 8, 16, 0),), (LayerBytes(16, 16, 16, 16, 32, 0),))
        >>> profile = Profile(batch=8, rows=(2, 4), layers=(layer,), bytes=sizes, kinds={"cpu": times})
        >>> profile.at(3).seconds["cpu"][0].forward
        1.25
    """

    batch: int
    rows: tuple[int, ...]
    layers: tuple[LayerInfo, ...]
    bytes: tuple[tuple[LayerBytes, ...], ...]
    kinds: Mapping[str, DeviceKind]
    devices: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[tuple[str, str], LinkSpeed] = field(default_factory=dict)
    skips: tuple[SkipBytes, ...] = ()
    loss_inside: bool = True

    def __post_init__(self) -> None:
        for name in ("kinds", "devices", "links"):
            object.__setattr__(self, name, dict(getattr(self, name)))
        if not self.layers or not self.rows or not self.kinds:
            raise ValueError("a profile needs layers, numbers of rows and kinds of device, and one of them is empty")
        positive_integers(batch=self.batch, **{f"rows[{i}]": each for i, each in enumerate(self.rows)})
        if list(self.rows) != sorted(set(self.rows)):
            raise ValueError(f"rows is {list(self.rows)}: wanted ascending numbers of at least 1")
        tables = {"bytes": self.bytes} | {f"seconds of {name!r}": each.seconds for name, each in self.kinds.items()}
        for what, table in tables.items():
            if len(table) != len(self.rows) or any(len(row) != len(self.layers) for row in table):
                raise ValueError(f"the {what} of the profile are not {len(self.rows)} rows x {len(self.layers)} layers")
            check_numbers(f"{what} of the profile", (number for row in table for layer in row for number in layer))
        check_numbers("bytes of the layers", (size for layer in self.layers for size in layer[2:]))
        for name, kind in self.kinds.items():
            check_numbers(f"memory of {name!r}", (kind.memory or 0, *(kind.host or ())))
        for ends, link in self.links.items():
            check_numbers(f"numbers of the link {ends}", link)
            if not link.bytes_per_second:
                raise ValueError(f"the link {ends} has no bytes_per_second: wanted a number above 0")
        for skip in self.skips:
            if not 0 <= skip.source < skip.target < len(self.layers) or len(skip.size) != len(self.rows):
                raise ValueError(f"the profile has {skip}, which does not go with its layers and rows")
            check_numbers("bytes of skip connections", skip.size)
        named = {*self.devices.values(), *(kind for ends in self.links for kind in ends)}
        if unknown := named - {*self.kinds}:
            raise ValueError(
                f"the profile has devices or links of the kinds {sorted(unknown)}, which are none of its kinds: "
                f"{', '.join(map(repr, self.kinds))}"
            )

    def _written(self) -> dict[str, Any]:
        return {
            **vars(self),
            "links": [[*ends, *link] for ends, link in self.links.items()],
            "kinds": {name: vars(kind) for name, kind in self.kinds.items()},
        }

    @classmethod
    def _read(cls, fields: dict[str, Any]) -> dict[str, Any]:
        def table(rows: Any, of: Callable[..., Any]) -> tuple[tuple[Any, ...], ...]:
            return tuple(tuple(of(*each) for each in row) for row in rows)

        return {
            **{name: fields[name] for name in ("batch", "devices", "loss_inside")},
            "rows": tuple(fields["rows"]),
            "layers": tuple(LayerInfo(*each) for each in fields["layers"]),
            "bytes": table(fields["bytes"], LayerBytes),
            "kinds": {
                name: DeviceKind(
                    table(kind["seconds"], LayerSeconds),
                    kind["memory"],
                    kind["estimated"],
                    kind.get("host") and LinkSpeed(*kind["host"]),  # older profiles have none
                )
                for name, kind in fields["kinds"].items()
            },
            "links": {(sender, receiver): LinkSpeed(*numbers) for sender, receiver, *numbers in fields["links"]},
            "skips": tuple(SkipBytes(source, target, tuple(size)) for source, target, size in fields["skips"]),
        }

    def kind_of(self, device: str) -> str:
        """The kind of a device, which may also be called by its kind.

        Raises:
            ValueError: the profile has no such device.
        """
        kind = self.devices.get(device, device)
        if kind not in self.kinds:
            known = ", ".join(map(repr, dict.fromkeys((*self.devices, *self.kinds))))
            raise ValueError(
                f"the profile has no times for device {device!r}: it knows {known}; make a profile on that device, too"
            )
        return kind

    def transfer(self, sender: str, receiver: str, size: float) -> float:
        """The seconds of a message of some bytes between two kinds of device.

        Example:
            >>> from pipework.planning.layer_costs import *
            >>> layer, times = LayerInfo("0", "Linear", 8, 8, 0), DeviceKind(((LayerSeconds(1, 1, 1),),))
            >>> links = {("cpu", "cpu"): LinkSpeed(1.0, 10.0)}
            >>> Profile(1, (1,), (layer,), ((LayerBytes(8, 8, 8, 8, 8, 0),),), {"cpu": times}, {}, links).transfer(
            ...     "cpu", "cpu", 20)
            3.0
        """
        link = self.link(sender, receiver)
        return 0.0 if link is None else link.seconds(size)

    def link(self, sender: str, receiver: str) -> LinkSpeed | None:
        """How fast values go between two kinds of device, if the profile has that for one of the directions."""
        return self.links.get((sender, receiver)) or self.links.get((receiver, sender))

    def predict(
        self,
        devices: Sequence[str],
        *,
        balance: Sequence[int],
        chunks: int,
        schedule: str | Schedule = "gpipe",
        checkpoint: str = "except_last",
        memory: float | str | Mapping[str, float | str] | None = None,
        batch: int | None = None,
        optimizer: float = 2.0,
    ) -> Plan:
        """What a pipe with these settings costs by this profile, as the plan that they are.

        Args:
            devices: of each worker: devices of the profile, or kinds of device.
            balance: the number of layers of each stage.
            chunks: the number of micro-batches.
            schedule: its name, or one of your own for as many workers, stages and micro-batches. Skip connections are
                those of the profile, whatever it has.
            checkpoint: as for `Pipe`; a schedule of your own may say itself what is recomputed.
            memory: as for :func:`pipework.plan`; a note of the plan says what does not fit.
            batch: the rows of a mini-batch; None: the profile's.
            optimizer: as for :func:`pipework.plan`.

        Raises:
            TypeError: an argument has a wrong type.
            ValueError: an argument is out of range, or they do not go together.

        Example:
            >>> from pipework.planning.layer_costs import *
            >>> layer, times = LayerInfo("0", "Linear", 8, 8, 0), DeviceKind(((LayerSeconds(1, 1, 1),) * 2,))
            >>> profile = Profile(8, (2,), (layer,) * 2, ((LayerBytes(8, 8, 8, 8, 8, 0),) * 2,), {"cpu": times})
            >>> profile.predict(["cpu", "cpu"], balance=[1, 1], chunks=4, checkpoint="never").seconds
            15.0
        """
        positive_integers(chunks=chunks)
        request = make_request(self, devices, memory, batch=batch, chunks=chunks, optimizer=optimizer)
        cut = checked_tuple("balance", balance, "[3, 3]")
        positive_integers(**{f"balance[{stage}]": each for stage, each in enumerate(cut)})
        if sum(cut) != len(self.layers):
            raise ValueError(f"balance is {list(cut)}, and the profile has {len(self.layers)} layers: wanted that sum")
        made = replace(_schedule(schedule, len(request.devices), len(cut), chunks, checkpoint), skips=())
        order = tuple(range(len(request.devices)))
        candidate = Candidate(request, order, made.placement, chunks, made, cut)
        notes = [
            f"this does not fit: worker {worker} needs {memory_text(held.total, 'bytes')} and may hold "
            f"{memory_text(held.limit, 'bytes')}"
            for worker, held in enumerate(candidate.workers)
            if not held.fits
        ]
        return candidate.plan(notes=notes)

    def at(self, rows: int) -> MicroBatchProfile:
        """Seconds and bytes for a micro-batch of some rows: measured, or on the line through the nearest two that were.

        Raises:
            ValueError: the number is less than 1.
        """
        if rows < 1:
            raise ValueError(f"rows is {rows}: wanted at least 1")
        kinds = {
            name: tuple(LayerSeconds(*self._between(rows, column)) for column in zip(*kind.seconds, strict=True))
            for name, kind in self.kinds.items()
        }
        near = min(bisect_left(self.rows, rows), len(self.rows) - 1)
        sizes = tuple(
            LayerBytes(*map(round, self._between(rows, column)))._replace(saves_input=column[near].saves_input)
            for column in zip(*self.bytes, strict=True)
        )
        skips = tuple(round(self._between(rows, [(size,) for size in skip.size])[0]) for skip in self.skips)
        return MicroBatchProfile(kinds, sizes, skips)

    def _between(self, rows: int, column: Sequence[Sequence[float]]) -> list[float]:
        """The numbers for some rows, from those for the profile's rows."""
        measured, least = self.rows, [number * rows / self.rows[0] for number in column[0]]
        if len(measured) == 1:
            return least
        high = min(max(1, bisect_left(measured, rows)), len(measured) - 1)
        share = (rows - measured[high - 1]) / (measured[high] - measured[high - 1])
        line = [below + share * (above - below) for below, above in zip(*column[high - 1 : high + 1], strict=True)]
        # Beyond the measured sizes a line could become negative, or far too small.
        beyond = least if rows < measured[0] else column[-1] if rows > measured[-1] else line
        return list(map(max, line, beyond))


def _schedule(schedule: str | Schedule, workers: int, stages: int, chunks: int, checkpoint: str) -> Schedule:
    """What a pipe runs: unlike a plan, it makes schedules by name for equal stages."""
    modes = {"always": chunks, "except_last": chunks - 1, "never": 0}
    one_of("checkpoint", checkpoint, modes)
    made = schedule
    if not isinstance(made, Schedule):
        made = build(made, workers=workers, chunks=chunks, stages_per_worker=max(1, stages // workers))
    found, wanted = (made.workers, made.stages, made.micro_batches), (workers, stages, chunks)
    if found != wanted:
        raise ValueError(
            f"schedule {made.name!r} is for (workers, stages, micro-batches) = {found}, and devices=, balance= and "
            f"chunks= are for {wanted}"
        )
    return made if recomputed(made) else with_recompute(made, modes[checkpoint])
