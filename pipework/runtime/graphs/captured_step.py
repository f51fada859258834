"""A training step that was captured: what its graphs need of a further step, and what they leave.

    static       inputs, targets, messages      copied in each step (`static_tensor`)
                 weights and scale of the loss  likewise, by the caller's stream
    in place     parameters, buffers            as they are at present
    pool         activations, gradients         overwritten in each step

Gradients, and the moments of deferred batch norms, lie in the pool, too. They are read before the next step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pipework.runtime.graphs.script import Ports, Receiving, Sending
from pipework.runtime.graphs.step_capture import StepCapture
from pipework.runtime.stage.actions import HANDLERS
from pipework.runtime.stage.stage_run import StageRun

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from pipework.model.batchnorm import DeferredBatchNorms, Moments
    from pipework.runtime.device import WorkerDevice
    from pipework.runtime.graphs.device_graphs import Graphs
    from pipework.runtime.random.streams import Key
    from pipework.runtime.stage.loss import InnerLoss
    from pipework.runtime.transport import Handler
    from pipework.runtime.worker import WorkerRun
    from pipework.schedule import Action


class CapturedStep:
    """A captured step; at first the step that is being captured.

    Args:
        graphs: of each worker of this process.
        deferred: the deferred batch norms of the layers.
        goes_on: whether the run goes on without graphs if an action cannot be captured.

    Attributes:
        capture: the run that captures; None: it is over.
        replayed: by stage, what follows the scripts; empty before the capture is over.
        given_up: why the step was not captured; empty: it was.
        is_new: whether the latest run was that which captured.
    """

    def __init__(self, graphs: Mapping[int, Graphs], deferred: DeferredBatchNorms, *, goes_on: bool) -> None:
        self._graphs = graphs
        self._deferred = deferred
        self._goes_on = goes_on
        self.capture: StepCapture | None = None
        self.replayed: dict[int, StageRun] = {}
        self.given_up = ""
        self.is_new = False
        self._gradients: dict[int, list[Tensor | None]] = {}
        self._moments: list[list[Moments]] = []
        self._weights: Tensor | None = None
        self._scale: Tensor | None = None

    def begin(self, key: Key) -> StepCapture:
        """The step is captured from now on."""
        self.capture = StepCapture(self._graphs, key, self._deferred, goes_on=self._goes_on)
        return self.capture

    def end(self, runs: Mapping[int, StageRun]) -> None:
        """The workers have run.

        Args:
            runs: the stages of the step.
        """
        capture, self.capture = self.capture, None
        self.is_new = capture is not None
        if capture is None:
            return
        self._gradients, self.given_up = capture.gradients, capture.given_up
        if not self.given_up:
            self.replayed = {stage: ReplayedStage(run, capture) for stage, run in runs.items()}

    def collect(self) -> None:
        """After the workers have run: what they have collected for deferred batch norms."""
        if self.is_new:
            self._moments = self._deferred.collected()
        else:
            self._deferred.collect(self._moments)

    def static_loss(self, loss: InnerLoss, device: torch.device, workers: Iterable[WorkerDevice]) -> InnerLoss:
        """The loss of a step with its numbers in static tensors, which graphs read.

        Args:
            loss: as the caller has made it.
            device: of the last stage.
            workers: those of accelerators.
        """
        weights, scale = loss.weights, loss.seed_scale
        if weights is not None or isinstance(scale, torch.Tensor):
            for worker in workers:
                worker.hand_over(())  # the caller may have another stream than in the step before, which reads them
        if weights is not None:
            self._weights = _put(self._weights, weights, device)
        if isinstance(scale, torch.Tensor):
            self._scale = _put(self._scale, (scale,), device)
            scale = self._scale[0]
        return replace(loss, weights=None if self._weights is None else self._weights.unbind(), seed_scale=scale)

    def wait(self) -> None:
        """Before the step is dropped: waits until the devices have replayed it."""
        for graphs in self._graphs.values():
            graphs.wait()

    def restore_gradients(self) -> None:
        """Before a step: the aliases have the gradients that graphs write, in place of sums over replicas."""
        for stage, replayed in self.replayed.items():
            for leaf, gradient in zip(replayed.aliases.leaves, self._gradients[stage], strict=True):
                leaf.grad = gradient


def _put(static: Tensor | None, numbers: tuple[float | Tensor, ...], device: torch.device) -> Tensor:
    """Copies numbers into a static tensor, which is made if there is none."""
    wide = torch.float32 if device.type == "mps" else torch.float64
    if any(isinstance(each, torch.Tensor) for each in numbers):
        now = torch.stack([torch.as_tensor(each, dtype=wide, device=device) for each in numbers])
    else:
        now = torch.tensor(numbers, dtype=wide)
    return now.to(device) if static is None else static.copy_(now, non_blocking=True)


class ReplayedStage(StageRun):
    """A stage in the further steps: it is as it was when it was captured, and its actions follow their scripts.

    Args:
        run: the stage, as it was captured.
        capture: of the step.
    """

    def __init__(self, run: StageRun, capture: StepCapture) -> None:
        self.__dict__.update(run.__dict__, draws=False, meter=None, capture=None)
        self._scripts = {key: script for key, script in capture.scripts.items() if key[1] == run.stage.index}
        self._sizes = capture.sizes
        every = [step for script in self._scripts.values() for step in script]
        self._receives = {step.name for step in every if isinstance(step, Receiving)}
        self._sends = {step.name for step in every if isinstance(step, Sending)}

    def connect(self, worker: WorkerRun) -> dict[str, Handler]:
        """See `StageRun.connect`."""
        receivers = {name: worker.endpoint.receiver(*name) for name in self._receives}
        senders = {name: worker.endpoint.sender(*name) for name in self._sends}
        before = (lambda: None) if worker.recorded is None else worker.recorded.begin
        ports, scripts = Ports(receivers, senders, worker.spec.step.key, before), self._scripts

        def replay(action: Action) -> None:
            kind, stage, micro_batch, _ = action
            for step in scripts.get((kind, stage, micro_batch), ()):  # a W of a stage that defers nothing has none
                step.replay(ports, micro_batch)

        return {kind: replay for kind in HANDLERS if kind in self._table}

    def disconnect(self) -> None:
        """See `StageRun.disconnect`: what there was to learn was learned when the step was captured."""

    def sizes(self, action: Action) -> tuple[int, int, int]:
        """See `StageRun.sizes`."""
        kind, stage, micro_batch, _ = action
        return self._sizes[kind, stage, micro_batch]

    def clear(self) -> None:
        """See `StageRun.clear`: a failure of a step leaves nothing that graphs would not overwrite."""
