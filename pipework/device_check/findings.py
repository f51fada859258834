"""What a check of devices has found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from pipework.device_check.speed import Speed


@dataclass(frozen=True)
class FailedCase:
    """A case that went wrong.

    Attributes:
        case: in words.
        seed: of its weights and data.
        text: what differed, or the error.
    """

    case: str
    seed: int
    text: str


@dataclass
class CheckedPlace:
    """A device, or a link between two.

    Attributes:
        source: a device.
        destination: the same for a device, another one for a link.
        cases: how many have been run.
        failures: those that went wrong.
        inexact: for how many cases the plain model differed from itself, so that results were compared with a
            tolerance.
        left_out: what could not be tried here, and why.
        speed: of copies; None: not measured.
    """

    source: torch.device
    destination: torch.device
    cases: int = 0
    failures: list[FailedCase] = field(default_factory=list)
    inexact: int = 0
    left_out: list[str] = field(default_factory=list)
    speed: Speed | None = None

    @property
    def name(self) -> str:
        """As it is printed."""
        return str(self.source) if self.is_device else f"{self.source} -> {self.destination}"

    @property
    def is_device(self) -> bool:
        """Whether it is a device."""
        return self.source == self.destination

    @property
    def verdict(self) -> str:
        """'ok', 'wrong', or 'not checked'."""
        return "wrong" if self.failures else "ok" if self.cases else "not checked"


@dataclass
class Findings:
    """What has been found so far.

    Attributes:
        places: devices first.
        seconds: that it took.
        interrupted: whether the user ended it.
    """

    places: list[CheckedPlace]
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def all_right(self) -> bool:
        """Whether every place was checked to the end, and nothing went wrong."""
        return not self.interrupted and all(place.verdict == "ok" for place in self.places)

    def as_json(self) -> dict[str, Any]:
        """Everything, for programs."""
        return {
            "all_right": self.all_right,
            "interrupted": self.interrupted,
            "seconds": round(self.seconds, 1),
            "places": [
                {
                    "kind": "device" if place.is_device else "link",
                    "source": str(place.source),
                    "destination": str(place.destination),
                    "verdict": place.verdict,
                    "cases": place.cases,
                    "inexact": place.inexact,
                    "left_out": place.left_out,
                    "failures": [vars(failure) for failure in place.failures],
                    "gigabytes_per_second": None if place.speed is None else dict(place.speed.rates),
                    "latency_microseconds": None if place.speed is None else place.speed.latency,
                }
                for place in self.places
            ],
        }
