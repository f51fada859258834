"""The captured steps of a pipe: which mini-batches run as they are, which one is captured, and which are replayed.

    the first mini-batches of a form    as without graphs: kernels are chosen, code is compiled, checks are made
    the next one                        captured
    all further ones                    replayed, if the layers are as they were
    the first one with other layers     as without graphs, and the next one is captured: kernels may be new, and code
                                        still to be compiled, neither of which a capture allows

The form of a mini-batch is what graphs cannot change: shapes and values beside tensors, the schedule, autocast. A few
forms are kept, as code for several shapes is.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from pipework.fsdp_private import fsdp_modules
from pipework.runtime.graphs.captured_step import CapturedStep
from pipework.runtime.graphs.device_graphs import Graphs, can_capture
from pipework.runtime.graphs.fingerprint import Fingerprint
from pipework.runtime.random.streams import has_random_state
from pipework.spot_checks import FIRST
from pipework.values.dtensor import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from pipework.model.batchnorm import DeferredBatchNorms
    from pipework.runtime.device import WorkerDevice
    from pipework.runtime.transport import Message

FORMS: Final = 2
"""So many forms of a mini-batch are kept: the usual one, and for example that of a last batch."""

_CHANGES: Final = 3  # so often in a row may the layers change before a captured step is replayed


class GraphCount(NamedTuple):
    """What a pipe has done with graphs, see `Pipe.graphs`.

    Attributes:
        captured: how many steps were captured.
        replayed: how many steps were replayed.
        eager: how many training steps ran without graphs.
        why: why the latest one of these did; empty: there was none.
    """

    captured: int = 0
    replayed: int = 0
    eager: int = 0
    why: str = ""


class _Form:
    """A form of a mini-batch.

    Attributes:
        form: as above.
        seen: so many of its mini-batches have run without graphs.
        captured: its step; None: it was not captured.
        is_used: whether the captured step was replayed.
        is_rare: whether other forms took the place of its captured step before that was replayed.
    """

    def __init__(self, form: tuple[Any, ...]) -> None:
        self.form = form
        self.seen = 0
        self.captured: CapturedStep | None = None
        self.is_used = self.is_rare = False


class CapturedSteps:
    """The captured steps of one engine.

    Args:
        how: the settings, see `Settings.graphs`.
        devices: of the workers of this process.
        layers: of this process, and the loss function if it is a module, with their names.

    Attributes:
        count: what was done so far.
        turn: held during a step, since all steps of a form use the same memory.

    Raises:
        ValueError: a device has no graphs, and it was not asked to go on without.
    """

    def __init__(
        self, how: frozenset[str], devices: Mapping[int, WorkerDevice], layers: Sequence[tuple[str, nn.Module]]
    ) -> None:
        self.count = GraphCount()
        self.turn = threading.Lock()
        self._how = how
        self._devices = devices
        self._layers = layers
        self._inputs: OrderedDict[int, Any] = OrderedDict()
        self._numbers = itertools.count(1)
        self._forms: list[_Form] = []
        self._graphs: dict[int, Graphs] = {}
        self._off = ""
        self._fingerprint: Fingerprint | None = None  # of the layers as they are
        self._layers_number = 0
        self._changed = ""
        self._all_layers: Sequence[int] = ()  # their numbers, of all processes, in the latest step
        self._changes = 0  # in a row, without a replay
        for worker, device in devices.items():
            if not can_capture(device.device):
                self._give_up(
                    f"worker {worker} computes on {device.device}, which has no graphs: graphs= is for CUDA devices, "
                    "and graphs='auto' uses them where there are any"
                )

    @property
    def is_on(self) -> bool:
        """Whether steps are captured."""
        return not self._off

    def fork(self) -> CapturedSteps:
        """The same captured steps. What the fork captures or drops is its own matter; it ends with `drop`."""
        fork = copy.copy(self)
        fork.count, fork._graphs, fork._inputs = GraphCount(), {}, self._inputs.copy()
        fork._forms = [copy.copy(form) for form in self._forms]
        return fork

    def drop(self) -> None:
        """Frees what was captured."""
        for form in self._forms:
            self._drop(form)
        self._graphs = {}

    def number_of(self, micro_batches: Sequence[Message]) -> int:
        """A number for the form of a mini-batch's inputs, from which processes without the inputs know the form."""
        described = [_described(each) for each in micro_batches]
        for number, other in self._inputs.items():
            if _alike(described, other):
                self._inputs.move_to_end(number)
                return number
        number = next(self._numbers)
        self._inputs[number] = described
        if len(self._inputs) > _REMEMBERED:
            self._inputs.popitem(last=False)
        return number

    def number_of_layers(self) -> int:
        """A number for the layers of this process as they are; 0: it goes on without graphs.

        What a stage sends depends on its layers. So all processes capture anew if those of one have changed.

        Raises:
            ValueError: the layers cannot be captured, and it was not asked to go on without.
        """
        if self._off:
            return 0
        changed = "the layers are new" if self._fingerprint is None else self._fingerprint.difference()
        if changed:
            self._refuse_layers()
        if self._off:
            return 0
        self._changed = changed
        if changed:
            self._fingerprint = Fingerprint(self._layers, {each.device.type for each in self._devices.values()})
            self._layers_number += 1
        return self._layers_number

    def _refuse_layers(self) -> None:
        """Gives up if graphs cannot compute what a layer computes."""
        for name, layer in self._layers:
            if fsdp_modules([layer]) or any(map(is_dtensor, layer.parameters())):
                self._give_up(f"layer {name!r} has DTensors, whose operators communicate: leave graphs= out")
            if has_random_state(layer):
                self._give_up(
                    f"layer {name!r} has a recurrent module with dropout, which draws from a state of its own: leave "
                    "graphs= out"
                )

    def step(
        self,
        form: tuple[Any, ...],
        layers: Sequence[int],
        targets: Sequence[Message],
        deferred: DeferredBatchNorms,
        why: str,
    ) -> CapturedStep | None:
        """The captured step for a training step; a new one is still to be captured; None: it runs without graphs.

        Args:
            form: of the mini-batch, without its targets.
            layers: their numbers, of all processes.
            targets: of the mini-batch.
            deferred: the deferred batch norms of the layers.
            why: why it must run without graphs; empty: nothing is known.

        Raises:
            ValueError: the layers cannot be captured, and it was not asked to go on without.
        """
        if 0 in layers and not self._off:
            self._give_up(f"worker {layers.index(0)} goes on without graphs, and its messages may differ in each step")
        found = self._found((*form, [_described(each) for each in targets]))
        if self._all_layers != layers and not self._off:
            self._take(layers)
        found.seen += 1
        why = why or self._off
        if not why and found.seen <= FIRST:
            why = f"the first {FIRST} mini-batches of each form, and one after a change of layers, run without graphs"
        if not why and found.is_rare:
            why = f"more than {FORMS} forms of mini-batches take turns: pad them to {FORMS} forms"
        captured = None if why else self._usable(found) or self._new(found, deferred)
        if captured is None:
            self.count = self.count._replace(eager=self.count.eager + 1, why=why or self._off)
        return captured

    def settle(self, captured: CapturedStep) -> list[str]:
        """After a step. Returns a warning if steps run without graphs from now on.

        Raises:
            ValueError: the layers keep a state in Python, and it was not asked to go on without graphs.
        """
        if not captured.is_new:
            self.count = self.count._replace(replayed=self.count.replayed + 1)
            return []
        assert self._fingerprint is not None
        if captured.given_up:
            self._give_up(captured.given_up)
        elif changed := self._fingerprint.difference():
            self._give_up(
                f"{changed} by its own forward, which a graph does not do again: change a buffer in place (.copy_(), "
                ".add_()), or leave graphs= out"
            )
        else:
            self.count = self.count._replace(captured=self.count.captured + 1)
        if self._off:
            self.count = self.count._replace(eager=self.count.eager + 1, why=self._off)
        return [f"the pipe goes on without graphs: {self._off}"] if self._off else []

    def _found(self, form: tuple[Any, ...]) -> _Form:
        """The form, which is the last one of all from now on."""
        found = next((each for each in self._forms if _alike(each.form, form)), None)
        if found is None:
            found = _Form(form)
        else:
            self._forms.remove(found)
        self._forms.append(found)
        for unused in self._forms[:-_REMEMBERED]:
            self._drop(unused)
        del self._forms[:-_REMEMBERED]
        return found

    def _take(self, layers: Sequence[int]) -> None:
        """Layers are new, or have changed. So nothing that was captured is of use."""
        if any(form.seen >= FIRST for form in self._forms):
            self._changes += 1
        if self._changes > _CHANGES:
            changed = self._changed or "the layers of another process have changed"
            self._give_up(
                f"{changed}, and so it was {_CHANGES} times before, without a replay in between: let a tensor hold "
                "what changes, or leave graphs= out"
            )
            return
        self._all_layers = layers
        self.drop()
        for form in self._forms:
            form.seen = min(form.seen, FIRST - 1)

    def _usable(self, found: _Form) -> CapturedStep | None:
        """The captured step of a form, if it was captured."""
        if found.captured is None or not found.captured.replayed:
            return None
        found.is_used, self._changes = True, 0
        return found.captured

    def _new(self, found: _Form, deferred: DeferredBatchNorms) -> CapturedStep | None:
        """A step of this form that is to be captured; None: the layers do not allow it."""
        hooked = "" if self._fingerprint is None else self._fingerprint.hooked
        if hooked and "hooks" not in self._how:
            self._give_up(
                f"{hooked} has hooks, which a graph does not call: remove them, or say that they need be called in "
                "captures only: graphs='hooks'"
            )
        if self._off:
            return None
        # All forms share the pools, since nothing in these outlives a step. Those of a failed capture are of no use.
        failed = [each for each in self._forms if each.captured is not None and not each.captured.replayed]
        for each in failed:
            self._drop(each)
        if failed or not self._graphs:
            self._graphs = {worker: Graphs(device.device) for worker, device in self._devices.items()}
        self._drop(found)
        for other in [each for each in self._forms if each.captured is not None][: -FORMS + 1]:
            other.is_rare = not other.is_used
            self._drop(other)
        if torch.accelerator.is_available():
            # Activations of earlier steps are gone, but the allocator keeps their memory, and gives it to no pool once
            # a capture has begun.
            torch.accelerator.empty_cache()
        found.captured = CapturedStep(self._graphs, deferred, goes_on="auto" in self._how)
        found.is_used = False
        return found.captured

    def _drop(self, form: _Form) -> None:
        """Frees what a form has captured, which the devices may still replay."""
        if form.captured is not None:
            form.captured.wait()
            form.captured = None

    def _give_up(self, text: str) -> None:
        """Nothing is captured from now on. Raises a ValueError if it was not asked to go on then."""
        if "auto" not in self._how:
            raise ValueError(text)
        self._off = text
        self.drop()


_REMEMBERED: Final = 16  # forms, of which some may have been captured


def _described(message: Message) -> Any:
    """All of a message that a graph cannot change."""
    tensors, structure = message
    every = [(t.shape, t.layout, t.dtype, t.device, t.requires_grad, type(t)) for t in tensors]
    return structure, every, [t.stride() for t in tensors if t.layout is torch.strided]


def _alike(one: Any, other: Any) -> bool:
    """Whether two descriptions are equal, as far as that is known."""
    try:
        return bool(one == other)
    except Exception:  # values of the user's classes, such as arrays of NumPy
        return False
