"""The script of an action: what is received, computed and sent when it is replayed, in this order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from pipework.runtime.random.streams import mix
from pipework.values.nested import same

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pipework.runtime.graphs.device_graphs import Graph, RandomState
    from pipework.runtime.graphs.static_tensor import StaticTensor
    from pipework.runtime.random.streams import Key
    from pipework.runtime.transport import Receive, Send

Name: TypeAlias = tuple[str, int]
"""The kind and stage of an address."""


class Ports(NamedTuple):
    """What a script needs of the run in which it is followed.

    Attributes:
        receivers: by name.
        senders: by name.
        key: of the random numbers.
        before: called when an action has received a message.
    """

    receivers: Mapping[Name, Receive]
    senders: Mapping[Name, Send]
    key: Key
    before: Callable[[], None]


@dataclass
class Transferring:
    """A message between the worker and what is outside.

    Attributes:
        name: of its address.
        statics: for its tensors; None: a tensor is missing.
        structure: around them.
    """

    name: Name
    statics: tuple[StaticTensor | None, ...]
    structure: Any


class Receiving(Transferring):
    """A message that comes from outside of the worker."""

    def replay(self, ports: Ports, micro_batch: int) -> None:
        """Copies the message of this step.

        Raises:
            RuntimeError: it is of another form, as only another process may send it.
        """
        tensors, structure = ports.receivers[self.name](micro_batch)
        is_callers = self.name == ("F", 0) or self.name[0] == "target"  # which the form of the step describes
        alike = is_callers or (len(tensors) == len(self.statics) and same(structure, self.structure))
        if not alike or not all(
            tensor is None if static is None else static.fits(tensor)
            for static, tensor in zip(self.statics, tensors, strict=True)
        ):
            raise RuntimeError(
                f"a stage received another form of message {self.name[0]!r} than its graph was captured for: let the "
                "layers of the other process return equal shapes, dtypes and values beside tensors in each step, or "
                "leave graphs= out"
            )
        for static, tensor in zip(self.statics, tensors, strict=True):
            if static is not None:
                static.fill(tensor)
        ports.before()


class Sending(Transferring):
    """A message that leaves the worker."""

    def replay(self, ports: Ports, micro_batch: int) -> None:
        """Sends copies of the static tensors."""
        tensors = tuple([None if static is None else static.copied() for static in self.statics])
        ports.senders[self.name](micro_batch, (tensors, self.structure))


@dataclass(slots=True)
class Replaying:
    """A graph.

    Attributes:
        graph: as above.
        draws: the states that it draws from, and for which layer.
    """

    graph: Graph
    draws: list[tuple[RandomState, int]]

    def replay(self, ports: Ports, micro_batch: int) -> None:
        """Launches it with the random numbers of this step."""
        for state, layer in self.draws:
            state.seed(mix(ports.key.value(), layer, micro_batch))
        self.graph.replay()


Script: TypeAlias = list[Receiving | Sending | Replaying]
