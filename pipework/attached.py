"""Attaches a pipe to a model, which keeps its class, its names and its methods; its forward runs in the pipe."""

from __future__ import annotations

import functools
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from pipework.assignment.assignment import assign
from pipework.assignment.from_plan import planned
from pipework.integrations import adapter_for
from pipework.model import mini_batch
from pipework.model.batchnorm import convert_deferred_batch_norm
from pipework.model.marks import MicroBatches, has_micro_batches
from pipework.model.parts.check import Weighed, check_parts, check_rows, left_out
from pipework.model.parts.cut import Cuttable, refuse_no_module, refuse_own_forward
from pipework.model.parts.following import Following, own_parameters, take_over
from pipework.model.parts.leaves import mapped
from pipework.model.parts.outputs import joined, output_dims
from pipework.model.parts.part import Part
from pipework.model.parts.run import Message
from pipework.model.parts.sample import OF_PIPE, ForwardArguments, LossPlace, arguments_of, as_given, single_rows
from pipework.model.parts.side_effects import unchanged_by_errors
from pipework.model.row_dimensions import Layout
from pipework.pipe import Pipe, backend_for
from pipework.planning.balance import balance_by_time
from pipework.settings import Settings
from pipework.signatures import positional_names, signature_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    import pipework
    from pipework.distributed.mesh import Mesh
    from pipework.model.marks import OwnSplit
    from pipework.planning.plan import Plan
    from pipework.schedule import Schedule, ScheduleSpec


def to_sequential(
    model: nn.Module, sample: Any, *, balance: Sequence[int] | None = None, blocks: Collection[type | str] | None = None
) -> nn.Sequential:
    """Any module as layers for `Pipe`, without rewriting it.

    Each layer is a copy of the model's containers around some of the model's own units, and runs the model's own
    forward: units of earlier layers return what they gave there, and the first unit of a later layer ends it. No
    parameter is copied, so the model and the layers are trained together.

    Args:
        model: any module. It stays as it is.
        sample: a small batch: the forward's keyword arguments as a dict, its positional ones as a tuple, or one tensor.
            The forward runs on its first two rows (three, if their number is odd) in training and in evaluation mode,
            without computing units. Of `MicroBatches` it takes the first, and all of what has no rows in common.
        balance: how many units each layer has; None: one layer for each unit.
        blocks: classes, or their names, whose modules are units. None: what the model's library says, else what stands
            in lists, and what is called beside them.

    Raises:
        ValueError: the model cannot be cut, or `balance` is for another number of units; the message says why.

    Example:
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        ...
        ...     def forward(self, x):
        ...         for block in self.blocks:
        ...             x = x + torch.relu(block(x))
        ...         return x
        >>> layers = to_sequential(Net(), torch.randn(2, 4))
        >>> len(layers)
        3
        >>> Pipe(layers, chunks=2, balance=[2, 1], devices=["cpu", "cpu"])(torch.randn(8, 4)).shape
        torch.Size([8, 4])
    """
    return Cuttable(model, sample, blocks=blocks, adapter=adapter_for(model)).sequential(balance)


def attach(
    model: nn.Module,
    sample: Any,
    *,
    target: str | None = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    loss_reduction: str = "mean",
    loss_weight: Callable[[Any], Any] | None = None,
    blocks: Collection[type | str] | None = None,
    chunks: int = 1,
    checkpoint: str = "except_last",
    balance: Sequence[int] | None = None,
    devices: Sequence[int | str | torch.device] | None = None,
    schedule: str | Schedule | ScheduleSpec = "1f1b",
    grad_scaler: torch.amp.GradScaler | None = None,
    deferred_batch_norm: bool | None = None,
    outputs: Literal["last", "all"] = "all",
    mesh: Mesh | DeviceMesh | None = None,
    check: bool = True,
    plan: Plan | None = None,
    split: OwnSplit | None = None,
    debug: str | Iterable[str] = (),
    graphs: bool | str | Iterable[str] = False,
    offload: bool | str | int = False,
) -> pipework.Pipe:
    """Makes a pipe of a model, and lets the model's forward run in it.

    Afterwards `model(**batch)` runs the schedule, and `loss.backward()` delivers the gradients to the model's own
    parameters. Its class, its names, its state dict and its other methods stay as they were. A model that computes no
    loss gets one, `loss_fn`, and `model(**batch, target=y)` returns it; or its schedule is "gpipe" (or another with all
    backwards after all forwards), and the call returns what the model returns, for a loss outside of the pipe.

    Outputs of micro-batches are joined along their rows, and numbers are averaged by rows. Other tensors without rows,
    such as similarities of rows with each other, become None, with a warning.

    With a mesh all processes call it, with the same model, which may lie on the meta device. Each process then has the
    values of its own units only: `model.parameters()` has these alone, and `model.state_dict()` and `model.generate()`
    raise an error that says where the others are. Use `pipe.state_dict()`, `save_checkpoint` and `save_pretrained`.

    Args:
        model: any module.
        sample: a small batch, with the target if the model computes its loss itself; see `to_sequential`. It decides
            along which dimension each tensor of later batches is cut: the one that has the sample's number of rows,
            which no other size may equal; `Chunk` and `NoChunk` in the sample say it themselves. Its first two rows
            decide what is sent between stages, how labels are counted, and without `balance` the cut.
        target: the argument of the forward that the model's own loss needs; None: "labels". A call without it returns
            what the model returns, and is for evaluation only, unless the schedule has all backwards after all
            forwards.
        loss_fn: a function of the model's output for a micro-batch, such as an object with its fields, and of that
            micro-batch of `target=`; it returns the loss, see `Pipe`. The model is then called as a `Pipe` is:
            `return_output=True` returns a pair. None: the model computes its loss itself, or the loss is outside.
        loss_reduction: see `Pipe`: what the model itself does over the rows, 'mean' or 'sum'.
        loss_weight: a function of a micro-batch's target that returns its weight in the mean; None: what the model's
            library says, else the number of rows.
        blocks: see `to_sequential`.
        chunks: see `Pipe`.
        checkpoint: see `Pipe`.
        balance: how many units each stage has; None: so that all stages take equally long for the sample, with a mesh
            so that they have equally many parameters.
        devices: see `Pipe`.
        schedule: see `Pipe`.
        grad_scaler: see `Pipe`.
        deferred_batch_norm: see `Pipe`; the model's batch norms are replaced.
        outputs: if workers are processes, which of them get what the model returns beside the loss: 'all', or 'last',
            that of the last stage. In training none does, and all get the loss.
        mesh: see `Pipe`.
        check: run the first rows of the sample through the model and through its parts, in evaluation mode, without
            gradients and with 0.5 for each random number, and compare the outputs; and compare the model's loss of
            these rows with what the pipe makes of the losses of each row. Nothing is compared with a mesh, or if parts
            of the model lie on another device than the sample, such as the meta device.
        plan: of the model's units: what `pipework.plan(model, sample)` returned. It decides chunks, checkpoint, balance
            and schedule, and the devices unless they are given.
        split: see `Pipe`. All arguments but the target are given to the function by their names, and what it returns
            is passed to the model in the same way.
        debug: see `Pipe`.
        graphs: see `Pipe`.
        offload: see `Pipe`.

    Returns:
        The pipe. `pipe.eval()` is not needed: it follows `model.train()` and `model.eval()`.

    Raises:
        ValueError: the model cannot be cut, there is no loss and the schedule needs one, the sample has one row or does
            not tell its rows, it cannot be told how the loss counts labels, or the pipe would give another result or
            train with another loss than the model; the message says why.

    Example:
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        ...
        ...     def forward(self, x, labels=None):
        ...         for block in self.blocks:
        ...             x = x + torch.relu(block(x))
        ...         return x if labels is None else {"loss": nn.functional.mse_loss(x, labels), "x": x}
        >>> model, batch = Net(), {"x": torch.randn(8, 4), "labels": torch.randn(8, 4)}
        >>> pipe = attach(model, batch, chunks=4, devices=["cpu", "cpu"])
        >>> model(**batch)["loss"].backward()
        >>> model.blocks[0].weight.grad.shape
        torch.Size([4, 4])
        >>> model, x = Net(), torch.randn(8, 4)
        >>> pipe = attach(model, x, loss_fn=nn.functional.mse_loss, chunks=4, devices=["cpu", "cpu"])
        >>> model(x, target=torch.zeros(8, 4)).backward()
    """
    # 1. What is asked for is checked, and the sample says what the forward takes.
    settings = Settings.of(locals())
    refuse_no_module(model)
    _refuse_attached_or_wrapped(model)
    refuse_own_forward(model)
    if outputs not in ("last", "all"):
        raise ValueError(f"outputs is not one of 'last' or 'all': got {outputs!r}")
    if loss_fn is not None and target is not None:
        raise ValueError(
            f"attach got loss_fn= and target={target!r}, which names the argument of a loss that the model computes "
            "itself: leave one of them out. What loss_fn compares with is given in the call, model(**batch, target=y)"
        )
    target = "labels" if target is None else target
    layout, adapter = Layout(positional_names(model), target if loss_fn is None else "target"), adapter_for(model)
    if split is None:
        split = adapter.split(as_given(sample)[1], layout.target)
    if split is None:
        layout = Layout.of_sample(layout.names, layout.target, *as_given(sample))
    layout.is_given = True
    with unchanged_by_errors(model) as before:
        # 2. A dry run shows how the model may be cut, what it returns, where its loss is, and how that counts labels.
        if deferred_batch_norm:
            convert_deferred_batch_norm(model, chunks)
        cuttable = Cuttable(model, sample, blocks=blocks, adapter=adapter, has_rows=split is None)
        forward = ForwardArguments(signature_of(type(model).forward.__get__(model)), target)
        names = forward.by_name(*cuttable.sample)
        settings, place = _with_own_loss(cuttable, settings, forward, names)
        forward = forward if place is not None else replace(forward, target=None)
        settings = replace(settings, split=None if split is None else functools.partial(forward.split, split))
        # 3. The model is cut into a part for each stage, and parts, loss and outputs are compared with the model's own.
        if plan is not None:
            settings = planned(settings, cuttable.sequential(), usual="1f1b")
        layers = cuttable.sequential(_balance(cuttable, settings) if settings.balance is None else settings.balance)
        if settings.loss_fn is None:
            _refuse_without_loss(cuttable, layers, settings, target, names)
        if split is None and not has_micro_batches(*as_given(sample)):
            layout.outputs = output_dims(cuttable, layout)
        if check and mesh is None:
            check_parts(cuttable, layers, before)
            ignored = _check_rows(cuttable, sample, settings, forward, place, layout)
            if place is not None and ignored:
                settings = replace(settings, loss_fn=replace(place, left_out=(*place.left_out, *ignored)))
        # 4. A pipe of the parts is made, and the model's forward runs in it.
        pipe = Pipe(layers, **vars(settings) | {"balance": [1] * len(layers), "plan": None})
        pipe._executor.settings = replace(pipe._executor.settings, plan=plan)  # the plan is of units
        pipe._executor.layout = layout
        pipe._executor.call = "model", f"**batch, {layout.target}=y"
        _leave_to_others(model, pipe, layers, cuttable)
        pipe._attached = AttachedModel(model, pipe, layers, cuttable, forward)
        model.__dict__["forward"] = AttachedForward(pipe._attached, pipe, cuttable.result, place, outputs)
        _refuse_steps_without_pipe(model)
        if place is not None and loss_reduction == "mean":
            adapter.weighs(target, settings.loss_weight)
    return pipe


def _refuse_attached_or_wrapped(model: nn.Module) -> None:
    """Raises a ValueError if a model has a pipe, or something changes how the whole model runs."""
    if isinstance(model.__dict__.get("forward"), AttachedForward):
        raise ValueError(
            f"a pipe is attached to this {type(model).__name__} already: use that one, or take it off with "
            "`del model.forward` before another is attached"
        )
    name = next((each.__name__ for each in type(model).__mro__ if each.__name__ in _WRAPPERS), None)
    if name is not None:
        raise ValueError(
            f"attach got a model in {name}, which would see the parts and not the model: attach the pipe to the model "
            "itself (.module), before it is wrapped or sharded; replicas are those of pipework.init(dp=...)"
        )


_WRAPPERS: Final = ("DistributedDataParallel", "DataParallel", "FSDPModule", "FullyShardedDataParallel")


def _with_own_loss(
    cuttable: Cuttable, settings: Settings, forward: ForwardArguments, names: Mapping[str, Any]
) -> tuple[Settings, LossPlace | None]:
    """The settings with the loss that the model computes itself, and where that is; None: it computes none."""
    target, weight = str(forward.target), settings.loss_weight
    place = LossPlace.in_result(cuttable.result) if settings.loss_fn is None and target in names else None
    if place is None:
        return settings, None
    if weight is None and settings.loss_reduction == "mean":

        def ask(labels: Any, **others: Any) -> Any:
            return cuttable.result_of(*forward.with_arguments(cuttable.sample, {target: labels, **others}))

        weight = cuttable.adapter.loss_weight(names[target], cuttable.result, ask)
    return replace(settings, loss_fn=place, loss_weight=weight), place


def _balance(cuttable: Cuttable, settings: Settings) -> list[int]:
    """How many units each stage has so that all take equally long; by their parameters where that is not measured."""
    layers, backend = cuttable.sequential(), backend_for(settings.mesh, settings.devices)
    assignment = assign(layers, settings.schedule, settings.chunks, None, backend.devices)
    balance = list(assignment.partitioning.balance)
    tensors = [*cuttable.model.parameters()]
    if not backend.is_whole or any(each.is_meta or each.grad is not None for each in tensors) or len(balance) < 2:
        return balance
    message = Message.first(cuttable.adapter.inputs(*cuttable.sample))
    try:
        mini_batch.split((message,), {}, 1)
    except ValueError:  # tensors of unequal lengths, such as packed sequences, have no rows
        return balance
    return balance_by_time(len(balance), layers, message, devices=assignment.partitioning.devices)


def _refuse_without_loss(
    cuttable: Cuttable, layers: nn.Sequential, settings: Settings, target: str, names: Collection[str]
) -> None:
    """Raises a ValueError if there is no loss, and the schedule has backwards before the last forward."""
    devices = backend_for(settings.mesh, settings.devices).devices
    assignment = assign(layers, settings.schedule, settings.chunks, [1] * len(layers), devices)
    if assignment.loss_may_be_outside(settings.chunks):
        return
    why = f"the sample has no {target!r} (it has {', '.join(map(repr, names))})"
    if target in names:
        why = (
            f"the forward of {type(cuttable.model).__name__} returned no loss for the sample (wanted a 0-dimensional "
            "tensor, alone, as 'loss' of what it returns, or as the first element of a tuple)"
        )
    raise ValueError(
        f"{why}, and schedule {assignment.schedule(settings.chunks).name!r} needs a loss inside of the pipe. If the "
        "model computes its loss, put the target into the sample (target= names its argument). If it does not, give a "
        "loss, attach(model, sample, loss_fn=lambda output, target: ...), and call model(**batch, target=y); or "
        "compute it outside: with schedule='gpipe', model(**batch) returns what the model returns"
    )


def _check_rows(
    cuttable: Cuttable,
    sample: Any,
    settings: Settings,
    forward: ForwardArguments,
    place: LossPlace | None,
    layout: Layout,
) -> tuple[int, ...]:
    """Compares loss and outputs of a few rows, or of what `split=` makes of the sample, with those of the pipe.

    Returns:
        The targets that the model's own loss leaves out, if the pipe does not know them; see `left_out`.
    """
    kind, rows = "row", []
    if settings.split is None:
        rows = single_rows(sample)
    else:
        kind, given = "micro-batch", arguments_of(sample)
        target = None if place is None else forward.by_name(*given).get(str(forward.target))
        rows = [(tuple(inputs), dict(named)) for inputs, named, _ in settings.split(*given, target, 2)]
    weighed = None
    if place is not None:
        weighed = Weighed(forward, place, settings.loss_reduction, settings.loss_weight, cuttable.adapter)
    check_rows(cuttable, rows, kind, weighed, layout.outputs)
    return () if weighed is None or kind != "row" else left_out(cuttable, rows, weighed)


def _leave_to_others(model: nn.Module, pipe: Pipe, layers: nn.Sequential, cuttable: Cuttable) -> None:
    """The parts of this process are the model's from now on; it has no values of those of other processes."""
    here = [layer for layer in layers if layer in set(pipe)]
    take_over(
        cuttable.containers,
        [layer.get_submodule("model") for layer in here],
        [layer.get_submodule("model") for layer in layers if layer not in here],
    )
    if len(here) < len(layers):
        model.__dict__["named_parameters"] = functools.partial(own_parameters, model)


def _refuse_steps_without_pipe(model: nn.Module) -> None:
    """While the pipe is attached: an optimizer refuses gradients of the model that no run of the pipe has computed.

    A trainer may put another forward on the model, or call modules of the model instead of the model. Its numbers are
    then those of the model without a pipe, and nothing else would show that the pipe does not run.
    """
    of_model, of_forward = weakref.ref(model), weakref.ref(model.__dict__["forward"])

    def check(optimizer: Optimizer, *_: Any) -> None:
        model, attached = of_model(), of_forward()
        now = None if model is None else model.__dict__.get("forward")
        if model is None or now is None or (attached is not None and attached._attached.trained_as == id(now)):
            return
        given = (each for group in optimizer.param_groups for each in group["params"] if each.grad is not None)
        if {*model.parameters()}.isdisjoint(given):
            return
        name = type(model).__name__
        why = f"nothing has called the {name} itself"
        if now is not attached:
            code: Any = getattr(now, "__code__", now)
            why = f"its forward has been replaced by {getattr(code, 'co_qualname', now)}"
        raise RuntimeError(
            f"{type(optimizer).__name__} got gradients of a {name} that the attached pipe has not computed: {why}. "
            "Attach a pipe to the module that is called in its place, such as the base_model of a model of "
            "transformers, with schedule='gpipe' if the loss is computed outside of that module; or take the pipe off "
            "with `del model.forward`"
        )

    def end() -> None:
        if (model := of_model()) is None or "forward" not in model.__dict__:  # else it was replaced
            hook.remove()

    hook = register_optimizer_step_pre_hook(check)
    weakref.finalize(model.__dict__["forward"], end)
    weakref.finalize(model, hook.remove)


class AttachedModel:
    """A model to which a pipe is attached; the pipe knows it, and it does not know the pipe.

    Args:
        model: the model.
        pipe: attached to it.
        layers: the parts of all stages.
        cuttable: of the model.
        forward: what its forward takes.

    Attributes:
        trained_as: the id of the forward that the model had when the pipe last trained it.
        spans: what each stage computes.
        units: the names of all units.
    """

    def __init__(
        self, model: nn.Module, pipe: Pipe, layers: nn.Sequential, cuttable: Cuttable, forward: ForwardArguments
    ) -> None:
        self.model = model
        self.spans = [layer.span for layer in layers if isinstance(layer, Part)]
        self.units = tuple(cuttable.units)
        self.adapter = cuttable.adapter
        self.target = forward.target
        self.forward = forward
        self.containers = frozenset(cuttable.containers.values())  # each part has a copy of them
        self.trained_as = 0
        takes_target = pipe._executor.settings.loss_fn is not None
        self._hint = "; with a target call {}({})".format(*pipe._executor.call) if takes_target else ""
        parts = [layer for layer in pipe if isinstance(layer, Part)]
        self._following = Following(cuttable, parts, is_whole=len(pipe) == sum(pipe.balance))

    def call_of(
        self, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
        """What the pipe is called with for these arguments of the model, and these by name."""
        try:
            names = self.forward.by_name(arguments, keywords)
        except TypeError as error:
            raise TypeError(f"{type(self.model).__name__}.forward: {error}{self._hint}") from None
        if self.target in names:
            names[self.target] = self.adapter.counted(self.target, names)
            arguments, keywords = self.forward.with_arguments((arguments, keywords), {self.target: names[self.target]})
        keywords = self.adapter.mini_batch(keywords)
        if not OF_PIPE.isdisjoint(keywords):
            arguments, keywords = self.forward.by_position(arguments, keywords)
        return arguments, keywords, names

    def follow(self, pipe: Pipe) -> None:
        """Makes the pipe as the model is now."""
        self._following.update()
        pipe.training = self.model.training


class AttachedForward:
    """The forward of a model to which a pipe is attached."""

    def __init__(self, attached: AttachedModel, pipe: Pipe, result: Any, place: LossPlace | None, outputs: str) -> None:
        self._attached, self._pipe, self._result, self._place, self._outputs = attached, pipe, result, place, outputs
        self.__signature__ = attached.forward.signature

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """What the model returns for a batch; in training with its loss alone. With `target=` see `Pipe`."""
        attached, pipe = self._attached, self._pipe
        model, adapter = attached.model, attached.adapter
        if arguments and arguments[0] is model:  # Accelerate binds what it takes out of its wrapper again
            arguments = arguments[1:]
        if adapter.is_generating(keywords):  # with a cache, the model runs by itself, and needs all layers
            return type(model).forward(model, *arguments, **keywords)
        options = {"outputs": self._outputs}
        for name in ("loss_scale",) if self._place is not None else OF_PIPE:
            if name in keywords and name not in self.__signature__.parameters:
                options[name] = keywords.pop(name)
        if "target" in options and pipe._executor.settings.loss_fn is None:
            raise ValueError(
                f"{type(model).__name__} was called with target=, and attach got no loss_fn that takes it: attach("
                "model, sample, loss_fn=lambda output, target: ...); or leave target= out, and compute the loss outside"
            )
        arguments, keywords, names = attached.call_of(arguments, keywords)
        target = None if attached.target is None else names.get(attached.target)
        if self._place is None or target is None:
            got = pipe(*arguments, **keywords, **options)
            return (got[0], adapter.form(got[1], names)) if options.get("return_output") else adapter.form(got, names)
        trains = model.training and torch.is_grad_enabled()
        got = pipe(*arguments, **keywords, target=target, return_output=not trains, **options)
        loss, result = (got, None) if trains else got
        if result is not None:
            one = adapter.form(result, names)
            if isinstance(one, MicroBatches):  # of the caller, or of the caller's `split=`
                one = adapter.form(joined(one), names)
            return self._place.put(loss, one)
        form = self._place.put(loss, adapter.form(self._result, names))
        return mapped(Tensor, lambda tensor: tensor if tensor is loss else None, form)
