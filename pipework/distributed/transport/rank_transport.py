"""The transport of one run between ranks: messages within a rank go through queues, all others through channels.

An action hands over its results as in one process. A result for another rank waits in an outbox until the schedule's
SEND action; a message from another rank is received into buffers from the schedule's RECV action on.
"""

from __future__ import annotations

import functools
from collections import deque
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch

from pipework.runtime.stage.actions import chained
from pipework.runtime.transport import LocalTransport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TypeAlias

    from torch import Tensor

    from pipework.distributed.backend import DistributedBackend
    from pipework.distributed.transport.channel import Channel
    from pipework.runtime.run_spec import RunSpec
    from pipework.runtime.skips.skip import Skip
    from pipework.runtime.transport import Address, Endpoint, Handler, Message, Receive, Send
    from pipework.schedule import Action

    _Leaving: TypeAlias = tuple[int, tuple[Tensor | None, ...], Any]  # what leaves the pipe for a micro-batch


class RankTransport:
    """See `pipework.runtime.transport.Transport`; also the endpoint of the one worker that is in this process."""

    def __init__(self, spec: RunSpec, backend: DistributedBackend) -> None:
        # For messages between stages of this rank, all of which run on one thread.
        local = LocalTransport(spec.placement, spec.engine.links, one_thread=True)
        self.outside: Endpoint = local.outside
        self._worker = backend.mesh.worker
        self._own = local.endpoints[self._worker]
        self._spec = spec
        self._channels = backend.connections.channels
        self._backend = backend
        self._progress = backend.monitor.progress
        self.failure = backend.new_failure()
        self._stages = len(spec.placement)
        self._outbox: dict[Address, tuple[Sequence[Tensor | None], Any]] = {}
        self._posted: dict[Address, Channel] = {}
        self._unposted: dict[Channel, deque[Address]] = {}
        self._results: list[_Leaving] = []
        self._input_gradients: list[_Leaving] = []
        skips = spec.engine.skips
        self._names = functools.cache(lambda kind, source, target: names_of_messages(kind, source, target, skips))

    @property
    def endpoints(self) -> dict[int, Endpoint]:
        """See `Transport.endpoints`."""
        return {self._worker: self}

    def close(self) -> None:
        """See `Transport.close`: releases the stages, and after a failure the messages that were not sent."""
        sharded = [run.sharded for run in self._spec.runs.values() if run.sharded is not None]
        if self.failure.happened and any(each.is_reducing for each in sharded):
            self._backend.mesh.break_layer_groups()  # another replica may never come to this collective
        self._spec = self._spec._replace(runs={})
        self._outbox.clear()
        self._results.clear()
        self._input_gradients.clear()
        if self.failure.happened:
            self._backend.connections.forget()

    def sender(self, kind: str, stage: int) -> Send:
        """See `Endpoint.sender`; a message to another rank waits for the SEND action."""
        if stage == self._stages and self._spec.shared_results != 0:
            return _noting(self._results, self._own.sender(kind, stage))
        if stage == -1 and self._spec.input_gradients:
            return _noting(self._input_gradients, self._own.sender(kind, stage))
        if not 0 <= stage < self._stages or self._spec.placement[stage] == self._worker:
            return self._own.sender(kind, stage)
        outbox = self._outbox

        def keep(micro_batch: int, message: Message) -> None:
            outbox[kind, stage, micro_batch] = message

        return keep

    def receiver(self, kind: str, stage: int) -> Receive:
        """See `Endpoint.receiver`."""
        posted, progress, receive_own = self._posted, self._progress, self._own.receiver(kind, stage)

        def receive(micro_batch: int) -> Message:
            address = kind, stage, micro_batch
            channel = posted.pop(address, None)
            if channel is None:
                for each, waiting in self._unposted.items():
                    self._post_known(each, waiting)
                channel = posted.pop(address, None)
                if channel is None:
                    return receive_own(micro_batch)
            with progress.waits():
                return channel.take(address)

        return receive

    def handlers(self, of_stage: Mapping[str, Handler]) -> Mapping[str, Handler]:
        """See `Endpoint.handlers`."""
        every = {
            **of_stage,
            "SEND_F": self._send,
            "SEND_B": self._send,
            "RECV_F": self._post,
            "RECV_B": self._post,
            "REDUCE_GRAD": lambda action: self._backend.reduce(self._spec, action.stage),
            "UNSHARD": self._unshard,
            "RESHARD": lambda action: self._spec.runs[action.stage].aliases.reshard(),
        }
        return {kind: chained(self._backend.before_action, handle) for kind, handle in every.items()}

    def finish(self) -> None:
        """See `Endpoint.finish`: exchanges results, and waits until all messages have arrived."""
        with self._progress.waits():
            self._backend.complete(self._spec)
            last = self._spec.placement[-1]
            if self._spec.shared_results != 0:
                if last == self._worker:
                    self._send_results()
                else:
                    self._receive_results(self._channels[last])
            if self._spec.input_gradients:
                self._share_input_gradients()
            for channel in self._channels.values():
                channel.flush()

    def _send(self, action: Action) -> None:
        kind, source, micro_batch, target = action
        channel = self._channels[self._spec.placement[target]]
        for name in self._names(kind[-1], source, target):
            address = (name, target, micro_batch)
            # The gradient of a skip may go another way: see `runtime/skips/`.
            if address in self._outbox or not name.startswith("B skip "):
                channel.send(address, *self._outbox.pop(address))

    def _unshard(self, action: Action) -> None:
        with self._progress.waits():
            self._spec.runs[action.stage].aliases.gather()

    def _post(self, action: Action) -> None:
        kind, target, micro_batch, source = action
        channel = self._channels[self._spec.placement[source]]
        waiting = self._unposted.setdefault(channel, deque())
        waiting.extend([(name, target, micro_batch) for name in self._names(kind[-1], source, target)])
        self._post_known(channel, waiting)

    def _post_known(self, channel: Channel, waiting: deque[Address]) -> None:
        """Posts receives in the order in which the other rank sends.

        It stops at an address of which this rank does not know yet whether the other one sends a message, for example
        the gradient of a skip before the forward has run. It goes on when that address or a later one is needed.
        """
        while waiting:
            address = name, stage, micro_batch = waiting[0]
            comes = self._spec.runs[stage].awaits(name, micro_batch)
            if comes is None:
                return
            waiting.popleft()
            if comes:
                channel.post(address)
                self._posted[address] = channel

    def _send_results(self) -> None:
        """Sends the results of the last stage to all other ranks; all losses in one message."""
        self._results.sort(key=itemgetter(0))  # a schedule may have another order
        stops = self._backend.asked_to_stop()
        losses: list[Tensor] = []
        needs_gradient = False
        if self._spec.shared_results is not None:
            parts = [tensors[0] for _, tensors, _ in self._results]
            needs_gradient = any(part is not None and part.requires_grad for part in parts)
            losses = [torch.stack([part.detach() for part in parts if part is not None])]
        for worker in sorted({*self._spec.placement} - {self._worker}):
            channel = self._channels[worker]
            channel.send(("results", self._stages, 0), losses, needs_gradient + 2 * stops)
            if self._spec.shared_results is None:
                for micro_batch, tensors, structure in self._results:
                    channel.send(("output", self._stages, micro_batch), tensors, structure)
        self._backend.stops |= stops

    def _receive_results(self, channel: Channel) -> None:
        hand_out = self._own.sender("F", self._stages)
        losses, flags = channel.receive(("results", self._stages, 0))
        self._backend.stops |= bool(flags & 2)
        if self._spec.shared_results is None:
            for micro_batch in range(self._spec.micro_batches):
                hand_out(micro_batch, channel.receive(("output", self._stages, micro_batch)))
            return
        for micro_batch, loss in enumerate(losses[0].unbind()):
            loss = loss.detach().requires_grad_(bool(flags & 1))
            hand_out(micro_batch, ((loss,), None))

    def _share_input_gradients(self) -> None:
        """Gives all ranks the gradients of the inputs, through the last one, which has a channel to each."""
        first, last = self._spec.placement[0], self._spec.placement[-1]
        if self._worker != first:
            channel, hand_out = self._channels[first if self._worker == last else last], self._own.sender("B", -1)
            receive = _noting(self._input_gradients, hand_out)
            for micro_batch in range(self._spec.micro_batches):
                receive(micro_batch, channel.receive(("B", -1, micro_batch)))
        others = {*self._spec.placement} - {first, last} if self._worker == last else {last} - {first}
        for worker in sorted(others) if self._worker in (first, last) else ():
            for micro_batch, tensors, structure in self._input_gradients:
                self._channels[worker].send(("B", -1, micro_batch), tensors, structure)


def _noting(noted: list[_Leaving], send: Send) -> Send:
    """Sends, and notes what was sent."""

    def note(micro_batch: int, message: Message) -> None:
        send(micro_batch, message)
        noted.append((micro_batch, *message))

    return note


def names_of_messages(kind: str, source: int, target: int, skips: Sequence[Skip]) -> list[str]:
    """The messages from one stage straight to another, in the order in which they are sent.

    Values and gradients of a skip connection may go different ways. A gradient goes one of two ways if its source may
    have returned the tensor, too, see `Skip.stage_after_source`; the names are those of both.

    Args:
        kind: "F" values, "B" gradients.
        source: the stage that sends.
        target: the stage that receives.
        skips: all of the pipe.

    Example:
        >>> from pipework.runtime.skips.skip import Skip
        >>> places = (0, 1, 2)
        >>> names_of_messages("B", 2, 1, [Skip("a", 0, (2,), places), Skip("b", 1, (2,), places)])
        ['B', 'B skip 0', 'B skip 1']
    """
    step = 1 if kind == "F" else -1
    names = [kind] if target == source + step else []
    for number, skip in enumerate(skips):
        if kind == "F" and target in skip.later and skip.value_from(target) == source:
            names.append(f"F skip {number}")
        if kind == "B" and source in skip.later:
            other = skip.stage_after_source if source == skip.later[0] else None
            if target in (skip.gradient_to(source), other):
                names.append(f"B skip {number}")
    return names
