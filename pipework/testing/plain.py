"""The plain model of a pipe: its own layers, run one after the other on one micro-batch after the other.

Of the runtime it uses the random numbers alone: no workers, no recomputation, no schedule. If the layers are in several
processes, each runs its own while the others wait, and all get its results through an all-gather:

    rank 0   layers -> output ~~>                          ~~> gradients -> layers
    rank 1                       leaves -> layers -> loss -> leaves

If the pipe is attached to a model that is in this process as a whole, the model's own forward runs.
"""

from __future__ import annotations

import base64
import functools
import io
import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from pipework.autograd import boundary
from pipework.autograd.aliases import Aliases, SharedMemory
from pipework.model import mini_batch
from pipework.runtime.random.streams import streams_inside
from pipework.runtime.skips import skip_tracker
from pipework.saving.collective import run_on_all_ranks
from pipework.testing.reference import drawing, streams_entered
from pipework.values import nested, structure_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipework.attached import AttachedModel
    from pipework.executor import Executor
    from pipework.model.mini_batch import MiniBatch
    from pipework.pipe import Pipe
    from pipework.runtime.transport import Message


class _Segment(NamedTuple):
    """Consecutive layers of one process.

    Attributes:
        place: of the process, among all.
        layers: each with its number in the model and its device; empty: another process has them.
    """

    place: int
    layers: list[tuple[int, torch.device, nn.Module]]


class _Passed(NamedTuple):
    """One micro-batch in one segment: the leaves that came in, what goes out, and the loss after the last layer."""

    leaves: tuple[Tensor, ...] = ()
    sent: tuple[Tensor, ...] = ()
    structure: Any = None
    loss: Tensor | None = None


class PlainModel:
    """The plain model.

    Args:
        pipe: whose layers it runs.
        executor: of the pipe.
        attached: the model to which the pipe is attached; None: there is none.

    Attributes:
        turns: how often a process has had its turn so far; the same number in all processes.
    """

    def __init__(self, pipe: Pipe, executor: Executor, attached: AttachedModel | None) -> None:
        self._pipe, self._executor = pipe, executor
        self._model = attached if attached is not None and pipe._backend.is_whole else None
        self.turns = 0
        placement, self._devices = executor._assignment.placement, executor._assignment.partitioning.devices
        firsts = [0, *itertools.accumulate(pipe.balance)]
        self._last = firsts[-1] - 1
        self._segments = [
            _Segment(
                0 if rank is None else pipe.ranks.everyone.index(rank),
                [
                    (firsts[stage] + n, self._devices[stage], layer)
                    for stage in stages
                    for n, layer in enumerate(executor._partitions.get(stage, ()))
                ],
            )
            for rank, stages in itertools.groupby(
                range(len(placement)), lambda stage: pipe._backend.rank_of(placement[stage])
            )
        ]

    @property
    def modules(self) -> list[nn.Module]:
        """What it runs in this process."""
        return list(self._pipe) if self._model is None else [self._model.model]

    def run(
        self, batch: MiniBatch, key: int, *, grad: bool
    ) -> tuple[list[Message], Tensor | None, dict[int, Tensor | None]]:
        """Runs a mini-batch forward, and backward if gradients are wanted. The batch's leaves get theirs.

        Args:
            batch: in micro-batches.
            key: of the random numbers.
            grad: whether gradients are wanted.

        Returns:
            As far as it is in this process: the outputs of each micro-batch, without a graph; the loss, if it is
            inside; and the gradients by the id of the parameter.
        """
        outputs: list[Message] = []
        parts: list[Tensor] = []
        waiting = []
        aliases = Aliases(self.modules if grad else ())
        memory = SharedMemory(aliases.leaves)
        with aliases.standing_in(), torch.set_grad_enabled(grad):
            for number in range(len(batch.micro_batches)):
                passed = self._forward(batch, number, key)
                last = passed[-1]
                if self._segments[-1].layers and (batch.loss is None or batch.loss.keeps_output):
                    outputs.append((tuple([tensor.detach() for tensor in last.sent]), last.structure))
                roots = [] if last.loss is None else [last.loss]
                parts += [root.detach() for root in roots]
                if batch.loss is None:  # the gradients belong to the joined outputs
                    waiting.append(passed)
                elif grad:
                    seeds = [torch.ones_like(root) * batch.loss.seed_scale_in(root.dtype) for root in roots]
                    self._backward(passed, roots, seeds)
                    memory.separate()
            joined = batch.joined(outputs, self._executor.layout) if waiting and outputs else None
            cut = [()] * len(waiting) if joined is None else joined.cut(cotangents_of(joined.tensors))
            for passed, gradients in zip(waiting if grad else (), cut, strict=False):
                self._backward(passed, passed[-1].sent, gradients)
                memory.separate()
        found = dict(zip(map(id, aliases.parameters), aliases.take_gradients(), strict=True))
        if self._pipe._backend.tied_stages:
            self._add_tied(found)
        return outputs, functools.reduce(torch.add, parts) if parts else None, found

    def _add_tied(self, gradients: dict[int, Tensor | None]) -> None:
        """Adds the gradients that other processes have of parameters that several use."""
        backend: Any = self._pipe._backend
        tied, everyone = backend.connections.tied._tied, self._pipe.ranks.everyone
        texts = self._pipe.ranks.all_gather_text(_packed({n: gradients.get(id(each.parameter)) for n, each in tied}))
        found = [_unpacked(texts[everyone.index(rank)]) for rank in backend.pipe_ranks]
        for n, each in tied:
            parts = [own[n].to(each.parameter.device) for own in found if own.get(n) is not None]
            gradients[id(each.parameter)] = functools.reduce(torch.add, parts) if parts else None

    def _forward(self, batch: MiniBatch, micro_batch: int, key: int) -> list[_Passed]:
        """Runs one micro-batch through all segments; what passed those of other processes is empty."""
        passed, message = [], batch.micro_batches[micro_batch]
        for segment in self._segments:
            run = functools.partial(self._run, segment, batch, micro_batch, key, message)
            is_last = segment is self._segments[-1]
            own, sent = self._in_turn(segment, run, lambda own: nested.unflatten(own.sent, own.structure), is_last)
            passed.append(own or _Passed())
            message = message if is_last else nested.flatten(sent)
        return passed

    def _backward(self, passed: Sequence[_Passed], roots: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Differentiates one micro-batch in all segments, the last one first.

        Args:
            passed: what `_forward` returned.
            roots: where it begins.
            gradients: of the roots.
        """

        def run(own: _Passed, begin: Sequence[Tensor], gradients: Any) -> list[Tensor | None]:
            differentiate(begin, gradients)
            return [leaf.grad for leaf in own.leaves]

        for segment, own in zip(reversed(self._segments), reversed(passed), strict=True):
            begin = roots if segment is self._segments[-1] else own.sent
            work = functools.partial(run, own, begin, gradients)
            _, gradients = self._in_turn(segment, work, lambda found: found, segment is self._segments[0])

    def _in_turn(
        self, segment: _Segment, work: Callable[[], Any], share: Callable[[Any], Any], is_end: bool
    ) -> tuple[Any, Any]:
        """Runs work in the process that has the segment.

        Returns:
            Its result there, else None; and in all processes what it shares, unless nothing comes after it.
        """
        self.turns += 1
        done = run_on_all_ranks(
            self._pipe.ranks,
            "run its layers for pipe.verify",
            work if segment.layers else lambda: None,
            lambda own: _packed(share(own)) if segment.layers and not is_end else None,
        )
        return done.own, None if is_end else _unpacked(done.shared[segment.place])

    def _run(self, segment: _Segment, batch: MiniBatch, micro_batch: int, key: int, message: Message) -> _Passed:
        """Runs the layers of a segment, and after the last one the loss."""
        is_first, is_last = segment is self._segments[0], segment is self._segments[-1]
        leaves, structure = message
        if not is_first:
            device = segment.layers[0][1]
            leaves = tuple([tensor.to(device).detach().requires_grad_(tensor.requires_grad) for tensor in leaves])
        value: Any = (tuple(map(boundary.enter, leaves)), structure)
        tracker, keys = skip_tracker.LocalTracker(), [skip.key for skip in self._executor.skips]
        loss: Tensor | None = None
        target = None if batch.targets is None else nested.unflatten(*batch.targets[micro_batch])
        with skip_tracker.using(tracker), drawing(set(self._devices), key, micro_batch) as enter_layer:
            if is_first:
                value = mini_batch.arguments_of(value)
            else:
                value, kept = nested.unflatten(*value)
                for number, skip in kept.items():
                    tracker.save(keys[number], *skip)
            if self._model is not None:
                enter_layer(0)
                value = self._of_model(self._model, *value)
            else:
                for number, device, layer in segment.layers:
                    enter_layer(number)
                    takes_target = batch.loss is not None and batch.loss.function is None and number == self._last
                    value = self._of_layer(layer, number, device, value, [target] if takes_target else [])
            if is_last and batch.loss is not None:
                enter_layer(self._last + 1)
                function = batch.loss.function
                loss = batch.loss.part(value if function is None else function(value, target), micro_batch)
                value = value if batch.loss.keeps_output else ()
        if not is_last:
            value = value, {keys.index(key): skip for key, skip in tracker._kept.items()}
        return _Passed(leaves, *nested.flatten(value), loss)

    def _of_layer(self, layer: nn.Module, number: int, device: torch.device, value: Any, target: list[Any]) -> Any:
        """What a layer returns for what the layer before returned."""
        arguments, keywords = value if number == 0 else (self._executor.tuples.arguments(value, layer, len(target)), {})
        if len({*self._devices}) > 1:
            arguments, keywords = nested.replaced((arguments, keywords), Tensor, lambda tensor: tensor.to(device))
        return layer(*arguments, *target, **keywords)

    def _of_model(self, attached: AttachedModel, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """What the model's own forward returns, with the random numbers that its units draw in a pipe."""
        adapter, model = attached.adapter, attached.model
        arguments, keywords = adapter.inputs(arguments, keywords)
        keywords = adapter.micro_batch(keywords)
        parts: Any = self._pipe[0]
        calls, counts, start = parts.span.calls, Counter[str](), streams_inside()
        assert start is not None, "inside of `drawing`"

        def stream_of(name: str) -> int | None:
            of_unit = calls[name][counts[name] : counts[name] + 1]
            counts[name] += 1
            return next((call.stream for call in of_unit), None)

        start(0)
        with streams_entered({name: model.get_submodule(name) for name in calls}, stream_of, start):
            return adapter.result(type(model).forward(model, *arguments, **keywords))


def cotangents_of(outputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Gradients of outputs whose loss is outside: random numbers, the same for the same shapes."""
    draw = torch.Generator().manual_seed(0)
    drawn = [torch.randn(each.shape, generator=draw).to(each) for each in outputs]
    return [each if each.is_floating_point() or each.is_complex() else None for each in drawn]


def differentiate(roots: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Goes backward from those roots that have a graph and a gradient."""
    pairs = [(r, g) for r, g in zip(roots, gradients, strict=False) if g is not None and r.requires_grad]
    if pairs:
        torch.autograd.backward([root for root, _ in pairs], [gradient for _, gradient in pairs])


def _packed(value: Any) -> str:
    """Nested tensors as text, with their strides, on which sums depend, but without the rest of their storage."""
    tensors, structure = nested.flatten(value)
    file = io.BytesIO()
    own = [tensor.detach().cpu().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
    torch.save((None if structure is None else structure_json.encode(structure), own), file)
    return base64.b64encode(file.getvalue()).decode()


def _unpacked(text: str) -> Any:
    form, tensors = torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    structure = None if form is None else structure_json.decode(form, len(tensors))
    return nested.unflatten(tuple(tensors), structure)
