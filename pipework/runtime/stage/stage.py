"""A stage: a partition with all that stays the same from mini-batch to mini-batch."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from pipework.autograd.fully_sharded import FullySharded
from pipework.autograd.stray_gradients import StrayGradients
from pipework.runtime.device import record_on
from pipework.runtime.random.streams import has_random_state
from pipework.runtime.stage.execution_views import execution_layers
from pipework.runtime.stage.layer_errors import doubtful_modules, layer_text
from pipework.runtime.stage.recomputation import MINI_BATCHES, MutableBuffers
from pipework.spot_checks import is_checked
from pipework.values.dtensor import local_part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipework.model.sequential import TupleRule
    from pipework.runtime.device import WorkerDevice
    from pipework.runtime.skips.skip import Skip


class Layer(NamedTuple):
    """One layer as a stage runs it."""

    module: nn.Module
    number: int  # in the un-partitioned module; names the layer's random stream
    name: str
    takes_tuple_whole: bool


class Stage:
    """A partition, its device, its skips and its buffers; it lives as long as its pipe.

    Args:
        index: the stage's number.
        layers: the user's layers in order, with their names.
        first_number: of the first of them in the un-partitioned module.
        device: where the stage's worker computes.
        shared: identities of the modules that other stages run, too.
        skips: all skip connections of the pipe.
        tuples: how a tuple reaches a layer.
        loss: computed after the layers, if it is a module.

    Attributes:
        giver: what returns the stage's input, as messages call it; None: the user.
    """

    def __init__(
        self,
        index: int,
        layers: Sequence[tuple[str, nn.Module]],
        *,
        first_number: int,
        device: WorkerDevice,
        shared: set[int],
        skips: Sequence[Skip],
        tuples: TupleRule,
        loss: nn.Module | None = None,
    ) -> None:
        self.index = index
        self.giver = f"the last layer of stage {index - 1}" if index else None
        self.skips = skips
        self.device = device
        self.doubtful = doubtful_modules(layers)  # see `refuse_untrainable`
        names = [name for name, _ in layers]
        runnable, self._views = execution_layers([layer for _, layer in layers], shared)
        self.layers = [
            Layer(module, number, name, tuples.keeps_whole(module))
            for number, (name, module) in enumerate(zip(names, runnable, strict=True), start=first_number)
        ]
        # The target is one more argument of the last layer, and does not count.
        last = self.layers[-1]
        whole = tuples.keeps_whole(last.module, others=1)
        self.layers_with_target = [*self.layers[:-1], last._replace(takes_tuple_whole=whole)]
        # Whether a recurrent layer's dropout has a state of its own on accelerators.
        self.has_random_state = any(map(has_random_state, runnable))
        # The situations in which a graph of this stage has been searched for hidden parameters; see `StageRun`.
        self.inspected: set[tuple[bool, bool, int]] = set()
        # By the id of a parameter, whether its gradient is deferred to W; see WeightGradientStore.
        self.deferred: dict[int, bool] = {}
        self.recompute_looks = iter(range(MINI_BATCHES))
        self._differentiated = itertools.count()
        self._with_loss = runnable if loss is None else [*runnable, loss]
        self.buffers = MutableBuffers(self._with_loss)

    @property
    def place(self) -> str:
        """The stage and its layers, as messages call them."""
        first, last = self.layers[0], self.layers[-1]
        inside = layer_text(last.name, last.module) if first is last else f"layers {first.name!r} to {last.name!r}"
        return f"stage {self.index} ({inside})"

    @property
    def last_layer(self) -> str:
        """The last layer, as messages call it."""
        return layer_text(self.layers[-1].name, self.layers[-1].module)

    def stray_gradients(self) -> StrayGradients | None:
        """Refuses gradients from outside of the pipe in one mini-batch; None: the mini-batch is not checked."""
        return StrayGradients(self) if is_checked(next(self._differentiated)) else None

    def fully_sharded(self) -> FullySharded | None:
        """The parameters of the stage that FSDP shards; None: it shards none."""
        return FullySharded.of(self.modules)

    def refresh(self) -> None:
        """Before a mini-batch: takes over what the user has changed in modules."""
        for view in self._views:
            view.refresh()
        if (stream := self.device.stream) is not None:
            # A layer may put another tensor in the place of a buffer while a kernel that reads it is still on its way.
            every = [local_part(buffer) for module in self._with_loss for buffer in module.buffers()]
            record_on(stream, [each for each in every if type(each) is Tensor and each.layout is torch.strided])

    def hand_back(self) -> None:
        """After a run: gives the user's modules the attributes that their views have assigned."""
        for view in self._views:
            view.hand_back()

    @property
    def modules(self) -> list[nn.Module]:
        """The layers' modules, as they are run."""
        return [layer.module for layer in self.layers]

    @property
    def training(self) -> bool:
        """Whether any of the layers is in training mode: a stage in evaluation mode is not checkpointed."""
        return any(layer.module.training for layer in self.layers)
