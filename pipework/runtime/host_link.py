"""The copies of an optimizer's step on the host: parameters come with their gradients, and go back without."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch

from pipework.runtime.device import is_accelerator

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor

    Group: TypeAlias = dict[str, Any]
    Work: TypeAlias = tuple[Group, Tensor, Tensor]  # a parameter with its group and its gradient

_AHEAD: Final = 2**28
"""Bytes of parameters that are on their way to the host, or wait there, at one time."""


def fetched(
    work: Iterable[Work], links: Mapping[torch.device, HostLink]
) -> Iterator[tuple[Work, HostLink, Tensor, torch.Event | None]]:
    """The parameters one after the other, on the host after an event, while the next ones are copied."""
    ahead: deque[tuple[Work, HostLink, Tensor, torch.Event | None]] = deque()
    size = 0
    for each in work:
        _, parameter, gradient = each
        link = links[parameter.device]
        ahead.append((each, link, *link.fetch(parameter, gradient)))
        size += parameter.nbytes
        while size > _AHEAD:
            size -= ahead[0][0][1].nbytes
            yield ahead.popleft()
    while ahead:
        yield ahead.popleft()


class HostLinks(dict[torch.device, "HostLink"]):
    """The link of each device, which keeps its streams: all users of a device share a pool of 32."""

    def __missing__(self, device: torch.device) -> HostLink:
        return self.setdefault(device, HostLink(device))


class HostLink:
    """Copies between a device and pinned host memory; on the CPU there is nothing to copy.

    Args:
        device: of the parameters.
    """

    def __init__(self, device: torch.device) -> None:
        self._copies = is_accelerator(device)
        if self._copies:
            self._down, self._up = torch.Stream(device), torch.Stream(device)

    def begin(self, ready: torch.Event | None = None) -> None:
        """Copies to the host wait for an event; None: for what the current stream has been given.

        Args:
            ready: after it the gradients are there, and nothing reads the parameters any more.
        """
        if self._copies:
            event = ready or torch.accelerator.current_stream(self._down.device).record_event()
            self._down.wait_event(event)

    def fetch(self, parameter: Tensor, gradient: Tensor) -> tuple[Tensor, torch.Event | None]:
        """Starts to copy a parameter and its gradient to the host."""
        if not self._copies:
            on_host = parameter.detach()
            on_host.grad = gradient
            return on_host, None
        stream = self._down
        with stream:
            on_host, on_host.grad = _pinned_copy(parameter), _pinned_copy(gradient)
            return on_host, stream.record_event()

    def give_back(self, on_host: Tensor, parameter: Tensor) -> None:
        """Starts to copy a parameter back. PyTorch keeps pinned memory until a copy from it has ended."""
        if self._copies:
            with self._up:
                parameter.copy_(on_host, non_blocking=True)
        elif on_host.data_ptr() != parameter.data_ptr():  # as after `p.data = p.data - ...`
            parameter.copy_(on_host)

    def end(self) -> None:
        """The current stream waits for the copies."""
        if self._copies:
            torch.accelerator.current_stream(self._up.device).wait_stream(self._up)


def _pinned_copy(tensor: Any) -> Tensor:
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
