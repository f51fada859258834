"""The settings of a pipe: what a user asked for, checked once, and passed whole to all that read it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, Self

from pipework.model.batchnorm import checked_chunks
from pipework.model.checkpoint import AS_SCHEDULED, MODES
from pipework.model.loss.settings import LossSettings, function_identity
from pipework.schedule import Schedule
from pipework.schedule.edges import recomputed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from pipework.distributed.mesh import Mesh
    from pipework.model.marks import OwnSplit
    from pipework.planning.plan import Plan
    from pipework.schedule import ScheduleSpec

ACTIVATIONS: Final = "activations"
CHECK_FINITE: Final = "check_finite"
ONE_THREAD: Final = "one_thread"


@dataclass(frozen=True, kw_only=True)
class Settings(LossSettings):
    """The arguments of `Pipe` beside the module, under their names; `attach` has most of them, too.

    `LossSettings` has those of the loss. `debug` becomes a set of names. `checkpoint` becomes `AS_SCHEDULED` where the
    schedule is the user's own and says itself what is recomputed.

    Raises:
        TypeError: see `LossSettings`.
        ValueError: likewise, or `chunks`, `checkpoint` or `debug` has a value that cannot be used.

    Example:
        >>> Settings(chunks=8, debug="one_thread").debug
        frozenset({'one_thread'})
    """

    chunks: int = 1
    checkpoint: str = "except_last"
    deferred_batch_norm: bool | None = None
    balance: Sequence[int] | None = None
    devices: Sequence[int | str | torch.device] | None = None
    schedule: str | Schedule | ScheduleSpec = "gpipe"
    mesh: Mesh | DeviceMesh | None = None
    plan: Plan | None = None
    split: OwnSplit | None = None
    debug: str | Iterable[str] = ()
    graphs: bool | str | Iterable[str] = False
    offload: bool | str | int = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_chunks(self.chunks)
        own = isinstance(self.schedule, Schedule)
        if self.checkpoint not in MODES and not (own and self.checkpoint == AS_SCHEDULED):
            raise ValueError(f"checkpoint is not one of 'always', 'except_last', or 'never': got {self.checkpoint!r}")
        if isinstance(self.schedule, Schedule) and recomputed(self.schedule):
            if self.checkpoint not in ("except_last", AS_SCHEDULED):  # the first is the default
                raise ValueError(
                    f"checkpoint is {self.checkpoint!r}, but the schedule says itself what is recomputed: leave "
                    "checkpoint= out, or R out of the schedule"
                )
            object.__setattr__(self, "checkpoint", AS_SCHEDULED)
        wanted: Any = self.debug
        names = frozenset([wanted] if isinstance(wanted, str) or not isinstance(wanted, Iterable) else wanted)
        for name in names - {CHECK_FINITE, ONE_THREAD}:
            raise ValueError(f"debug is one or several of 'check_finite' and 'one_thread': got {name!r}")
        object.__setattr__(self, "debug", names)
        if self.split is not None and not callable(self.split):
            raise TypeError(f"split is {self.split!r}: wanted a function that cuts a mini-batch, or None")
        asked: Any = self.graphs
        for name in [asked] if isinstance(asked, str) or not isinstance(asked, Iterable) else asked:
            if not isinstance(name, bool) and name not in ("auto", "hooks"):
                raise ValueError(f"graphs is True, False, or one or several of 'auto' and 'hooks': got {name!r}")
        if self.graph_names and CHECK_FINITE in names:
            raise ValueError(
                "debug='check_finite' reads every value, which graphs= does not allow: leave one of them out"
            )
        self._check_offload()

    def _check_offload(self) -> None:
        offload, schedule = self.offload, self.schedule
        number = isinstance(offload, int) and not isinstance(offload, bool) and offload >= 1
        if not (number or offload is False or offload == ACTIVATIONS):
            raise ValueError(
                "offload is False; 'activations', so that all of them move; or how many micro-batches, from 1 on, the "
                f"newest, stay on the device for each stage: got {offload!r}"
            )
        scheduled = isinstance(schedule, Schedule) and "O" in schedule.kinds
        if self.keep is not None and scheduled:
            raise ValueError(
                f"offload is {offload!r}, but the schedule says itself what goes to host memory: leave offload= out, "
                "or O and L out of the schedule"
            )
        if self.graph_names and (self.keep is not None or scheduled):
            raise ValueError(
                "graphs of a device cannot hold activations that are in host memory: leave graphs= out, or offload= (O "
                "and L, in a schedule of your own)"
            )

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Those among the arguments of a function, such as its `locals()`."""
        return cls(**{name: arguments[name] for name in cls.names() if name in arguments})

    @classmethod
    def names(cls) -> list[str]:
        """The names of all settings."""
        return [each.name for each in fields(cls)]

    @property
    def graph_names(self) -> frozenset[str]:
        """What `graphs` says as a set of names; with any of them "on" is there, too."""
        if isinstance(self.graphs, bool):
            return frozenset({"on"} if self.graphs else ())
        return frozenset({"on", self.graphs} if isinstance(self.graphs, str) else {"on", *self.graphs})

    @property
    def keep(self) -> int | None:
        """See `with_offload`; None: all micro-batches stay on the device."""
        if self.offload is False:
            return None
        return 0 if self.offload == ACTIVATIONS else int(self.offload)

    @property
    def told(self) -> dict[str, Any]:
        """What all ranks must have asked for alike, as JSON values, beside schedule and balance."""
        plain = {name: getattr(self, name) for name in ("chunks", "checkpoint", "loss_reduction")}
        functions = {name: function_identity(getattr(self, name)) for name in ("loss_fn", "loss_weight", "split")}
        flags = {"deferred_batch_norm": bool(self.deferred_batch_norm), "grad_scaler": self.grad_scaler is not None}
        names = {"debug": sorted(self.debug), "graphs": sorted(self.graph_names)}
        return {**plain, **functions, **flags, **names, "offload": self.keep}
