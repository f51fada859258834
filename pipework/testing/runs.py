"""The runs of a pipe and of its plain model on one mini-batch: each begins with the same state and the same seed."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from pipework import torch_private
from pipework.autograd import boundary
from pipework.distributed.data_digest import data_digest
from pipework.doubts import Doubts
from pipework.model.marks import Chunk, MicroBatches, NoChunk, has_micro_batches
from pipework.model.parts.side_effects import put_back
from pipework.model.row_dimensions import values_in
from pipework.model.sequential import named_layers
from pipework.runtime.random.streams import draw_key, micro_batch_here
from pipework.runtime.stage.recomputation import is_recomputing
from pipework.saving.collective import run_on_all_ranks
from pipework.spot_checks import FIRST
from pipework.testing.comparison import apart, on_host
from pipework.testing.plain import PlainModel, cotangents_of, differentiate
from pipework.torch_private import pytree
from pipework.values import nested

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pipework.model.marks import Piece
    from pipework.pipe import Pipe
    from pipework.runtime.graphs.captured_steps import CapturedSteps

# By kind ("outputs", "loss", ...), what a run gave: tensors on the CPU and plain values, by name.
Values: TypeAlias = dict[str, dict[str, Any]]
# A tensor in a trace: its micro-batch, its layer, whether it is a gradient, and its number among such tensors.
Place: TypeAlias = tuple[int, str, bool, int]


class LayerTrace:
    """What layers give in a run, and the gradients of that, noted by hooks.

    Attributes:
        seen: copies on the CPU, in the order of the run.
        turns: for each how often a process of the plain model had had its turn.
    """

    def __init__(self, plain: PlainModel, layers: Mapping[str, nn.Module]) -> None:
        self.seen: dict[Place, Tensor] = {}
        self.turns: dict[Place, int] = {}
        self._plain = plain
        self._counts = Counter[tuple[int, str, bool]]()
        for name, layer in {id(layer): (name, layer) for name, layer in layers.items()}.values():
            layer.register_forward_hook(functools.partial(self._gave, f"{name!r} ({type(layer).__name__})"))

    def _gave(self, layer: str, module: nn.Module, inputs: Any, output: Any) -> None:
        micro_batch = micro_batch_here()
        for tensor in (each for each in pytree.tree_leaves(output) if isinstance(each, Tensor)):
            if not is_recomputing():
                self._note((micro_batch, layer, False), tensor)
            if tensor.requires_grad:
                noted = functools.partial(self._note, (micro_batch, layer, True))
                tensor.register_hook(noted)  # type: ignore[no-untyped-call]

    def _note(self, place: tuple[int, str, bool], tensor: Tensor) -> None:
        key = (*place, self._counts[place])
        self._counts[place] += 1
        self.seen[key], self.turns[key] = on_host(tensor), self._plain.turns

    def joined(self) -> dict[Place, Tensor]:
        """The outputs of all micro-batches in one, as far as they are cut along dimension 0."""
        parts: dict[Place, list[Tensor]] = {}
        for micro_batch, layer, is_gradient, number in sorted(self.seen):
            tensor = self.seen[micro_batch, layer, is_gradient, number]
            if not is_gradient and tensor.dim():
                parts.setdefault((0, layer, False, number), []).append(tensor)
        alike = {key: each for key, each in parts.items() if len({tensor.shape[1:] for tensor in each}) == 1}
        return {key: torch.cat(each) for key, each in alike.items()}


class Runs:
    """The runs of a pipe and of its plain model on one mini-batch.

    Args:
        pipe: to be verified.
        inputs: of the mini-batch.
        keywords: likewise.
        target: likewise.

    Attributes:
        trains: whether the model is in training mode, in any process.
        without_dropout: whether the next runs leave dropout out.
        has_whole: whether there is a whole batch, whose outputs or loss can be compared.
        has_target: whether the loss is inside.
        captured_steps: those that `of_replays` uses; None: the pipe has no graphs.
    """

    def __init__(self, pipe: Pipe, inputs: tuple[Any, ...], keywords: dict[str, Any], target: Any) -> None:
        self.pipe, self.attached = pipe, pipe._attached
        executor = self.executor = copy.copy(pipe._executor)  # for this object alone
        has_graphs = bool(executor.settings.graph_names)
        # The workers of a process are connected with those of the others, and captured steps belong to theirs.
        if not pipe._backend.is_whole or (has_graphs and pipe._executor._engine is not None):
            executor._engine, executor.deferred = pipe._executor.engine_in_use(), pipe._executor.deferred
        steps = executor.engine_in_use().captured_steps if has_graphs else None
        self.captured_steps = None if steps is None else steps.fork()
        executor.doubts = Doubts(warns=False)
        executor.layout = copy.deepcopy(executor.layout)
        if self.attached is not None and self.attached.target is not None and target is not None:
            keywords["target"] = target  # is an argument of the model
        self._call = inputs, keywords, target
        self.plain = PlainModel(pipe, executor, self.attached)
        loss = executor.settings.loss_fn
        self._roots = [pipe, *pipe.partitions, *self.plain.modules, *([loss] if isinstance(loss, nn.Module) else [])]
        self.without_dropout = self.has_whole = self.has_target = self._traces = False
        trains = pipe.training if self.attached is None else self.attached.model.training
        if self.attached is None and pipe._backend.is_whole:
            trains = any(each.training for each in pipe)
        told = self.of_all([draw_key(), trains, 0 if pipe._backend.is_whole else data_digest(self._call)])
        if len({digest for _, _, digest in told}) > 1:
            raise ValueError(
                "pipe.verify got other data on some ranks: give all of them, replicas too, the same batch, and not None"
            )
        self._seed, self.trains = told[0][0], any(each[1] for each in told)
        self.grad = self.trains and torch.is_grad_enabled()
        self._start = self._attributes()

    def of_all(self, value: Any) -> list[Any]:
        """What this process and all others give, as JSON values."""
        return run_on_all_ranks(self.pipe.ranks, "verify the pipe", lambda: value, share=lambda own: own).shared

    @contextlib.contextmanager
    def instead(self) -> Iterator[None]:
        """Inside, an executor of its own stands in the pipe, and runs without graphs; afterwards all is as it was."""
        before, self.pipe._executor = self.pipe._executor, self.executor
        try:
            with self._replayed_by(None):
                yield
        finally:
            self.pipe._executor = before
            if self.captured_steps is not None:
                self.captured_steps.drop()

    @contextlib.contextmanager
    def _replayed_by(self, steps: CapturedSteps | None) -> Iterator[None]:
        """A context in which training steps of the pipe are captured and replayed by these; None: by nothing."""
        if self.captured_steps is None:
            yield
            return
        engine = self.executor.engine_in_use()
        before, engine.captured_steps = engine.captured_steps, steps
        try:
            yield
        finally:
            engine.captured_steps = before

    def traced(self, run: Callable[[], Values]) -> LayerTrace:
        """What the layers give in a run."""
        self._traces = True
        run()
        self._traces = False
        return self._trace

    @contextlib.contextmanager
    def _begun(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], Any, list[Tensor]]]:
        """A context for one run; its end puts the state back.

        Yields:
            Copies of the inputs, the keywords and the target, and those of the inputs that get a gradient.
        """
        with put_back(self._roots, values=True):
            for module in (module for root in self._roots for module in root.modules()):
                if self.without_dropout and not isinstance(module, torch_private.StatisticsNorm):
                    module.training = False
            if self._traces:
                self._trace = LayerTrace(self.plain, self._layers())
            arguments, keywords, target = self._call
            if self.attached is not None:
                self.attached.follow(self.pipe)
                arguments, keywords, names = self.attached.call_of(arguments, keywords)
                target = target if self.attached.target is None else names.get(self.attached.target)
            torch.default_generator.manual_seed(self._seed)
            made: dict[int, tuple[Tensor, Tensor]] = {}
            arguments, keywords, target = _renewed((arguments, keywords, target), made)
            self.has_target = target is not None
            yield arguments, keywords, target, [leaf for leaf, _ in made.values() if leaf.requires_grad]

    def of_replays(self) -> tuple[Values, str]:
        """A mini-batch in the pipe, whose captured step is replayed: the pipe's own one, if there is one for its form.

        Returns:
            As of `of_pipe`; nothing if no process has replayed anything. And why one has not; empty: all have.
        """
        steps = self.captured_steps
        if steps is None:
            return {}, ""
        if not (self.grad and self.has_target):
            return {}, "graphs are of training steps with a target, and this is none"
        with self._replayed_by(steps):
            # A step that returns outputs, too, is of another form.
            for number in range(FIRST + 3):
                values = self.of_pipe(keeps_output=number > 0)
                told = self.of_all([steps.count.replayed, "" if steps.is_on else steps.count.why])
                if all(replayed or off for replayed, off in told):
                    break
        why = next((off or steps.count.why for replayed, off in told if not replayed), "")
        if not any(replayed for replayed, _ in told):
            return {}, why
        return {kind: own for kind, own in values.items() if number or kind != "outputs"}, why

    def of_pipe(self, *, keeps_output: bool = True) -> Values:
        """A mini-batch in the pipe.

        Args:
            keeps_output: whether the output is wanted beside a loss inside.
        """
        with self._begun() as (arguments, keywords, target, leaves):
            loss, output = None, None
            with torch.set_grad_enabled(self.grad):
                if target is None:
                    output = self.pipe.forward(*arguments, **keywords, outputs="all")
                elif self.executor.settings.loss_fn is None or not keeps_output:
                    loss = self.pipe.forward(*arguments, **keywords, target=target)
                else:
                    loss, output = self.pipe.forward(*arguments, **keywords, target=target, return_output=True)
            parts = list(output) if isinstance(output, MicroBatches) else [output]
            outputs = [tensor for part in parts if part is not None for tensor in nested.flatten(part)[0]]
            wanted = [*(each for each in self.pipe.parameters() if each.requires_grad), *leaves]
            found: dict[int, Any] = {}
            roots = [each for each in ([loss] if loss is not None else outputs) if each.requires_grad]
            if self.grad and roots:
                scaler = self.executor.settings.grad_scaler  # it has scaled the gradients already
                if loss is not None:
                    seeds = [torch.ones_like(loss) * (1.0 if scaler is None else scaler.get_scale())]
                else:
                    pairs = zip(outputs, cotangents_of(outputs), strict=True)
                    seeds = [each for output, each in pairs if output.requires_grad and each is not None]
                if wanted:
                    gradients = torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
                    found = dict(zip(map(id, wanted), gradients, strict=True))
                else:
                    torch.autograd.backward(roots, seeds)  # other processes wait for this one
            return self._values(outputs, loss, found, [found.get(id(leaf)) for leaf in leaves])

    def of_plain(self, *, whole: bool = False) -> Values:
        """The same mini-batch in the plain model.

        Args:
            whole: in one micro-batch.
        """
        with self._begun() as (arguments, keywords, target, leaves):
            key, executor, threads = draw_key(), copy.copy(self.executor), torch.get_num_threads()
            engine, settings = self.executor.engine_in_use(), executor.settings
            if whole:
                executor.settings = replace(settings, chunks=1, split=settings.split and _whole)
            is_cut = settings.split is None or target is not None  # what a function of the caller's cuts stays apart
            self.has_whole = is_cut and not has_micro_batches(arguments, keywords)
            keeps_output = settings.loss_fn is not None
            try:
                torch.set_num_threads(engine.workers.intra_op_share(threads))
                batch = executor.prepared(arguments, keywords, target, grad=self.grad, keeps_output=keeps_output)
                if whole and batch.loss is not None:
                    batch.loss = replace(batch.loss, weights=None)  # as the function says
                with self.executor.deferred.mini_batch(engine.lock):
                    results, loss, found = self.plain.run(batch, key, grad=self.grad)
            finally:
                torch.set_num_threads(threads)
            of_inputs = [(tuple([leaf.grad for leaf in pieces]), None) for pieces, _ in batch.micro_batches]
            differentiate(batch.tensors, batch.pieces.join(of_inputs))  # as far as the copies of the caller's tensors
            outputs = batch.joined(results, executor.layout).tensors if results else ()
            gradients = {
                id(each): torch_private.after_hooks(each, found.get(id(each))) for each in self.pipe.parameters()
            }
            return self._values(outputs, loss, gradients, [leaf.grad for leaf in leaves])

    def _values(
        self, outputs: Sequence[Tensor], loss: Tensor | None, gradients: Mapping[int, Any], of_inputs: Sequence[Any]
    ) -> Values:
        last, first = self.pipe.is_last, self.pipe.is_first
        parameters = [pair for pair in self.pipe.named_parameters() if pair[1].requires_grad and self.grad]
        return {
            "outputs": {f"output {n}": on_host(each) for n, each in enumerate(outputs) if last},
            "loss": {"the loss": on_host(loss)} if loss is not None and last else {},
            "gradients": {f"gradient of {name}": on_host(gradients.get(id(each))) for name, each in parameters}
            | {f"gradient of input {n}": on_host(each) for n, each in enumerate(of_inputs) if first and self.grad},
            "buffers": {f"buffer {name}": on_host(each) for name, each in self.pipe.named_buffers()},
            "attributes": {
                name: value for name, value in self._attributes().items() if apart(value, self._start.get(name)) > 0
            },
        }

    def _attributes(self) -> dict[str, Any]:
        """The numbers and tensors that modules hold beside parameters and buffers, also in lists and dicts.

        Those of an attached model's parts and of the modules around its units are left out: each part has others.
        """
        around = frozenset[nn.Module]() if self.attached is None else self.attached.containers.union(self.pipe)
        of_every_module = vars(nn.Module())
        return {
            each.name: on_host(each.value)
            for name, module in self.named_modules.items()
            for attribute, value in vars(module).items()
            if attribute not in of_every_module and module not in around and not isinstance(value, nn.Module)
            for each in values_in(f"{name}.{attribute}", value)
            if isinstance(each.value, int | float | Tensor)
        }

    @property
    def rounds(self) -> bool:
        """Whether gradients are added in another order than by the plain model, so that their last bits may differ."""
        backend = self.pipe._backend
        powers = 2 ** (backend.ranks.replicas - 1).bit_length()
        return self.attached is not None or bool(backend.tied_stages) or powers != backend.ranks.replicas

    @property
    def named_modules(self) -> dict[str, nn.Module]:
        """The modules in this process, by their names in the model."""
        roots = [self.pipe] if self.plain.modules[0] in set(self.pipe) else self.plain.modules
        return dict(pair for root in roots for pair in root.named_modules() if pair[0])

    def without_averages(self, values: Values) -> Values:
        """What may be compared with the whole batch.

        A model's own loss, among its outputs, is averaged by rows. What a function of the caller's has cut comes back
        in micro-batches.
        """
        outputs = values["outputs"].items() if self.executor.settings.split is None else ()
        own = {name: each for name, each in outputs if self.attached is None or each.dim()}
        return {**values, "outputs": own, "attributes": {}}

    def _layers(self) -> dict[str, nn.Module]:
        """What has hooks while the first difference is looked for."""
        if self.attached is None or not self.pipe._backend.is_whole:
            return {name: layer for part in self.pipe.partitions for name, layer in named_layers(part)}
        calls: Any = self.pipe[0].span.calls  # type: ignore[union-attr]
        return {name: self.attached.model.get_submodule(name) for name in calls}


def _renewed(value: Any, made: dict[int, tuple[Tensor, Tensor]]) -> Any:
    """A nested value with a copy of each tensor, which a layer may change.

    Args:
        value: may have tensors in the marks of pipework, too.
        made: receives by the id of the tensor a leaf with its values, and the copy: that leaf, or a result of it.
    """

    def renewed(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if id(leaf) not in made:
                own = leaf.detach().clone().requires_grad_(leaf.requires_grad)
                made[id(leaf)] = own, own if leaf.is_leaf else boundary.enter(own)
            return made[id(leaf)][1]
        mark = copy.copy(leaf)
        vars(mark).update({name: _renewed(own, made) for name, own in vars(leaf).items()})
        return mark

    return nested.replaced(value, (Tensor, NoChunk, Chunk, MicroBatches), renewed)


def _whole(arguments: tuple[Any, ...], keywords: dict[str, Any], target: Any, chunks: int) -> list[Piece]:
    """The function of `split=` that cuts nothing."""
    return [(arguments, keywords, target)]
