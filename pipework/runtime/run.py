"""One run of the workers: a forward, a backward, or a whole training step.

           the caller's thread                                 the workers' threads

    1 connect: each stage gets the functions that receive
      and send its messages, each thread its actions
    2 launch: the workers' streams wait for the caller's;
      inputs lie in their boxes; each thread has a job  -->    the caller's settings and modes, and aliases in
                                                               place of parameters; F makes graphs, cut at the
    3 wait until all jobs have ended, or one has failed        boundaries of the stage, B runs autograd on this
      and woken the others; the caller's streams wait   <--    thread; kernels go into the worker's stream
      for the workers', and for copies between devices
    4 collect: what came out, and what was recorded

A failure is the first exception of all workers. The caller's thread raises it after 3.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from pipework.runtime.device import record_on
from pipework.runtime.launch import ThreadRun
from pipework.runtime.out_of_memory import note_memory
from pipework.runtime.random.unseen_draws import LateDraws

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextvars import Context

    from pipework.runtime.run_spec import RunSpec
    from pipework.runtime.transport import Message


class PipeRun:
    """A run of all workers of this process; making it connects them (1).

    Args:
        spec: what it is.

    Attributes:
        failure: of the run.
    """

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._transport = spec.engine.backend.transport(spec)
        self.failure = self._transport.failure
        workers = [*spec.engine.devices]
        groups = [workers] if spec.one_thread else [[worker] for worker in workers]
        self._threads = [ThreadRun(spec, self._transport, numbers) for numbers in groups]
        self._workers = [worker for thread in self._threads for worker in thread.workers]

    def execute(self, sent: Mapping[tuple[str, int], Sequence[Any]], variables: Context) -> None:
        """Launches the workers (2), and waits for them (3).

        Args:
            sent: by kind of action and stage, what is sent to these for each micro-batch.
            variables: the caller's. A context can be entered once at a time only, so each thread gets a copy.
        """
        engine, failure = self._spec.engine, self.failure
        with engine.lock:
            try:
                # 2
                for device in engine.accelerators:
                    device.wait_for_caller()
                for (kind, stage), messages in sent.items():
                    if engine.has(stage):
                        send = self._transport.outside.sender(kind, stage)
                        for micro_batch, message in enumerate(messages):
                            send(micro_batch, message)
                late_draws = LateDraws([each.not_held for each in self._workers if each.not_held is not None])
                # 3
                engine.workers.run([partial(variables.copy().run, each) for each in self._threads], failure.report)
                if (late := late_draws.error()) is not None:
                    failure.report(late)
            except BaseException as error:  # such as no memory for a copy of the inputs
                failure.report(error)
            # Also after a failure: what was launched before still reads inputs and parameters.
            for device in engine.accelerators:
                device.hand_over(())
            for way in engine.links.values() if engine.accelerators else ():
                if way is not None:
                    way.hand_over(received=not failure.happened)
            for each in engine.stages.values():
                each.hand_back()
            for worker in self._workers:
                worker.disconnect()
        if failure.happened:
            note_memory(failure, list(engine.stages.values()), list(self._spec.runs.values()))
        self._transport.close()

    def collect(self) -> tuple[list[Message], list[Message]]:
        """What has come out of a run without a failure (4).

        Returns:
            For each micro-batch, the output of the last stage, and the gradient of each tensor that stage 0 was given;
            each is empty if the run does not compute it, or this process neither has it nor wants it.
        """
        spec, step, stages = self._spec, self._spec.step, len(self._spec.placement)
        if step.recorder is not None:
            if spec.forward:  # not before: a mini-batch that failed is no measurement
                step.recorder.begin(step.number, spec.program.schedule, loss_outside=step.loss is None)
            recorded = [worker.recorded.intervals() for worker in self._workers if worker.recorded is not None]
            step.recorder.add(step.number, spec.engine.backend.all_intervals([*chain.from_iterable(recorded)]))
        has_outputs = spec.forward and (spec.engine.has(stages) or spec.shared_results != 0)
        outputs = self._received("F", stages) if has_outputs else []
        return outputs, self._received("B", -1) if spec.input_gradients and step.takes_gradients else []

    def _received(self, kind: str, stage: int) -> list[Message]:
        """For each micro-batch, the message to the caller, whose streams have waited for it."""
        messages = list(map(self._transport.outside.receiver(kind, stage), range(self._spec.micro_batches)))
        for place in {device.device for device in self._spec.engine.accelerators}:
            tensors = [tensor for tensors, _ in messages for tensor in tensors]
            record_on(torch.accelerator.current_stream(place), tensors)
        return messages
