"""A dry run of a model's forward: which units it calls in which order, and to which of them each tensor goes.

Units compute nothing: they give zeros in the shapes that they give on the meta device. A dispatch mode follows each
operator of the forward, and notes of each tensor from which sources it was computed.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipework import torch_private
from pipework.model.parts import run as runs
from pipework.model.parts.leaves import flatten, held_by, mapped, tensors_in, unflatten
from pipework.model.parts.run import PartRun, memory_of
from pipework.model.parts.side_effects import (
    ChangesInPlace,
    LeftTensors,
    changed_numbers,
    generators_put_back,
    put_back,
)
from pipework.model.parts.skeleton import own_attributes
from pipework.model.parts.trace import END, CannotCut, PartSpan, Source, Trace, call_name, positional_names
from pipework.runtime.random.streams import DROPOUTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pipework.model.parts.adapter import SideOutputs
    from pipework.model.parts.leaves import Absent
    from pipework.model.parts.skeleton import AbsentUnit, Unit

_RANDOM = Source("random", "", 0)
_PLACEHOLDER = Source("placeholder", "", 0)
_READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)  # values, and no operator notices
_HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
_PLAIN_TENSORS = (Tensor, nn.Parameter)
_META = torch.device("meta")


class DryRun(PartRun, torch_private.DispatchMode):  # type: ignore[misc]
    """A run in which all units are followed and none computes.

    Args:
        model: its class, as messages call it.
        side_outputs: collects what units give beside what they return.
        device: where the sample is.
        absent_units: by the name of a unit, what gives what the unit gave.
        draw: in place of each random number that is drawn alone; such a one may decide which units are called.
        computes_losses: whether units that give a single number compute it, with zeros for their parameters.

    Attributes:
        decides: whether the forward has read a random number.
    """

    def __init__(
        self,
        model: str,
        side_outputs: SideOutputs,
        device: torch.device,
        absent_units: Mapping[str, AbsentUnit],
        draw: float,
        *,
        computes_losses: bool,
    ) -> None:
        torch_private.DispatchMode.__init__(self)
        nothing = Trace(model, (), {}, frozenset(), frozenset(), frozenset())
        PartRun.__init__(self, PartSpan(nothing, 0, 0, is_last=True), {}, {}, device, side_outputs, absent_units)
        self._model = model
        self._order: list[str] = []
        self._in_place = ChangesInPlace(model)
        self._inputs: list[tuple[Source, Tensor, int]] = []
        self._parameters: tuple[str, ...] = ()
        self._glue: set[str] = set()
        self._uses: dict[Source, set[float]] = {}
        self._sources: dict[int, set[Source]] = {}
        self._kept: list[Tensor] = []  # so that no other tensor gets the memory of one that is followed
        self._filled_in: dict[int, Tensor] = {}
        self._owned: dict[int, str] = {}
        self._pauses = False
        self._drawn: list[str] = []
        self._written: list[str] = []
        self._draw = draw
        self._computes_losses = computes_losses
        self._left = LeftTensors(model)
        self.decides = False

    def follow(self, tensor: Tensor, sources: Iterable[Source]) -> None:
        """Notes from what a tensor was computed."""
        self._kept.append(tensor)
        self._sources.setdefault(memory_of(tensor), set()).update(sources)

    def follow_all(self, kind: str, name: str, tree: Any) -> None:
        """Notes the tensors of a nested value as sources."""
        for number, leaf in enumerate(flatten(tree)[0]):
            if isinstance(leaf, Tensor):
                self.follow(leaf, [Source(kind, name, number)])

    def follow_inputs(self, parameters: tuple[str, ...], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Notes the inputs of the forward as sources.

        Args:
            parameters: the names of its positional arguments.
            arguments: the positional arguments.
            keywords: the others.
        """
        self._parameters = parameters
        names = positional_names(parameters, len(arguments))
        for name, value in (*zip(names, arguments, strict=True), *keywords.items()):
            for number, leaf in enumerate(flatten(value)[0]):
                if isinstance(leaf, Tensor):
                    self.follow(leaf, [Source("input", name, number)])
                    self._in_place.note_origin(memory_of(leaf), Source("input", name, number))
                    self._inputs.append((Source("input", name, number), leaf, torch_private.version(leaf)))

    def own(self, name: str, tensor: Tensor) -> None:
        """Notes a parameter or a buffer, which the forward must not change."""
        self._kept.append(tensor)
        self._owned[memory_of(tensor)] = name

    def follows(self, tensor: Tensor) -> bool:
        """Whether a tensor was computed from inputs, from what units gave, or from parameters."""
        return any(source.kind != "buffer" for source in self._sources.get(memory_of(tensor), ()))

    def use(self, tree: Any, position: float) -> None:
        """Notes that tensors go to the call at a position."""
        for source in self._sources_of(held_by(tree)):
            self._uses.setdefault(source, set()).add(position)

    def trace(self) -> Trace:
        """What has been found.

        Raises:
            CannotCut: the forward computes with the values of its `parameters()`.
        """
        if _PLACEHOLDER in self._uses:
            raise CannotCut(
                f"{self._model}'s forward computes with the values of self.parameters(), of which each part has some "
                "only: compute it outside of the forward, or leave it to a unit"
            )
        changed = {call for call, tensor, version in self._returned if torch_private.version(tensor) != version}
        uses = self._in_place.merged(self._uses, changed)
        return Trace(
            self._model,
            tuple(self._order),
            uses,
            frozenset(changed),
            frozenset(source for source, tensor, version in self._inputs if torch_private.version(tensor) != version),
            frozenset(self._glue),
            frozenset(source for source, _, _ in self._inputs),
            self._parameters,
        )

    def call(self, unit: Unit, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """What the unit gives, without its values."""
        name = unit.unit_name
        call = call_name(name, self._counts[name])
        self._counts[name] += 1
        given = tensors_in((arguments, keywords))
        if not any(tensor.requires_grad for tensor in given) and not self._computes(unit, arguments, keywords):
            self._glue.add(call)
            return self._computed(unit, arguments, keywords)
        self.use((arguments, keywords), len(self._order))
        self._order.append(call)
        before = self._side_outputs.mark()
        try:
            with self._pausing(), torch.no_grad(), runs.using(None), generators_put_back():
                output = self._form(call, unit, arguments, keywords)
            beside = self._side_outputs.since(before)
        finally:
            self._side_outputs.remove(before)
        self._refuse_hidden(call, output)
        device = given[0].device if given else self._device
        output, beside = self._filled((output, beside), call, self._device if device == _META else device)
        self._side_outputs.add(beside)
        if self._computes_losses and any(each.is_floating_point() and not each.dim() for each in tensors_in(output)):
            output = self._of_zeros(unit, arguments, keywords)
        output = self._absent_units[name].replay(output, arguments, keywords)
        self._returned += [(call, tensor, torch_private.version(tensor)) for tensor in tensors_in(output)]
        return output

    def parameters_of(self, forms: tuple[Absent, ...]) -> Iterator[Tensor]:
        """Tensors without values; the forward may ask for their dtype and device only."""
        for tensor in super().parameters_of(forms):
            self.follow(tensor, [_PLACEHOLDER])
            yield tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operator, and follows what it computes."""
        kwargs = dict(kwargs or {})
        self._left.refuse_reading(tensors_in((args, kwargs)))
        written = [self._owned[key] for key in map(memory_of, _written(func, args, kwargs)) if key in self._owned]
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if self._pauses:
            self._written += written
            self._drawn += [str(func)] if is_random else []
            return func(*args, **kwargs)
        if written:
            raise CannotCut(
                f"{self._model}'s forward changes {written[0]} in place, outside of the units at which it is cut, and "
                "each part would change it: leave it to a unit, or do it outside of the forward"
            )
        args, kwargs = self._valued((args, kwargs))
        result = func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        sources = self._sources_of(given)
        if is_random:
            sources.add(_RANDOM)
            if isinstance(result, Tensor) and result.is_floating_point() and not result.dim():
                result.fill_(self._draw)
        made = tensors_in(result)
        if sources:
            for tensor in (*made, *(given if torch_private.changes_arguments(func) else ())):
                self.follow(tensor, sources)
        if not made:  # a number: the forward reads values, and will in every part
            self.decides |= _RANDOM in sources
            self._read(sources)
        return result

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Follows the operators inside, and what no operator shows."""
        with _Functions(self), self:
            yield

    def before_function(self, function: Any, args: tuple[Any, ...]) -> None:
        """Notes what the forward does to a tensor that no operator shows.

        Raises:
            CannotCut: it registers a hook on a tensor.
        """
        if self._pauses or self.computing is not None:
            return
        if function in _READS:
            self._read(self._sources_of(tensors_in(args)))
        if function in _HOOKS:
            raise CannotCut(
                f"{self._model}'s forward registers a hook on a tensor, outside of the units at which it is cut, and "
                "each part would register it again: leave it to a unit, or register a hook on a module"
            )

    def _read(self, sources: Iterable[Source]) -> None:
        for source in sources:
            self._uses.setdefault(source, set()).add(END)

    def _sources_of(self, tensors: Iterable[Tensor]) -> set[Source]:
        return set().union(*(self._sources.get(memory_of(tensor), ()) for tensor in tensors))

    @contextlib.contextmanager
    def _pausing(self) -> Iterator[None]:
        before, self._pauses = self._pauses, True
        try:
            yield
        finally:
            self._pauses = before

    def _valued(self, tree: Any) -> Any:
        """Arguments of an operator, with zeros for parameters and buffers of the meta device."""

        def zeros(tensor: Tensor) -> Tensor:
            if not tensor.is_meta:
                return tensor
            key = id(tensor)
            if key not in self._filled_in:
                self._kept.append(tensor)
                self._filled_in[key] = torch.zeros_like(tensor, device=self._device)
                self.follow(self._filled_in[key], self._sources_of([tensor]))
            return self._filled_in[key]

        arguments, keywords = mapped(Tensor, zeros, tree)
        if "device" in keywords and keywords["device"] == _META:
            keywords["device"] = self._device
        return arguments, keywords

    def _computes(self, unit: Unit, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> bool:
        """Whether a unit whose inputs have no gradient is one; otherwise it runs in every part."""
        if next(unit.parameters(), None) is not None or isinstance(unit, DROPOUTS) or torch_private.has_hooks(unit):
            return True
        if any(isinstance(each, torch_private.StatisticsNorm) for each in unit.modules()):
            return True
        counts = len(self._drawn), len(self._written)
        mark = self._side_outputs.mark()
        modules = [(module, own_attributes(module)) for module in unit.modules()]
        buffers = [(buffer, buffer.clone()) for buffer in unit.buffers()]
        state = put_back(unit)
        with self._pausing(), torch.no_grad(), torch.random.fork_rng(devices=[]), runs.using(None), state:
            unit.train()
            try:
                copies = mapped(Tensor, Tensor.clone, (arguments, dict(keywords)))
                unit.plain_forward(*copies[0], **copies[1])
            except Exception:  # of a form that it does not take in training; its call says what
                return False
            finally:
                keeps = any(changed_numbers(module, before) for module, before in modules)
                keeps |= (len(self._drawn), len(self._written)) != counts
                for buffer, before in buffers:
                    buffer.copy_(before)
                del self._drawn[counts[0] :], self._written[counts[1] :]
                self._side_outputs.remove(mark)
        return keeps

    def _refuse_hidden(self, call: str, output: Any) -> None:
        """Raises an error if a unit returns tensors where nothing finds them."""
        for leaf in flatten(output)[0]:
            iterates = hasattr(leaf, "__next__")
            if not isinstance(leaf, Tensor) and (iterates or held_by(leaf)):
                raise CannotCut(
                    f"{call} returned an object of type {type(leaf).__name__}, which holds its tensors where they "
                    "cannot be sent to another part: return them in a tuple, list, dict or dataclass"
                )

    def _filled(self, tree: Any, call: str, device: torch.device) -> Any:
        """The value with zeros for tensors of the meta device."""
        leaves, form = flatten(tree)
        with self._pausing():
            for number, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor):
                    zeros = torch.zeros_like(leaf, device=device)
                    if leaf.is_floating_point() and torch.is_grad_enabled():
                        # No leaf, since the forward may change it in place; and not as large a leaf behind it.
                        zeros += torch.zeros((), dtype=leaf.dtype, device=device, requires_grad=True)
                    self.follow(zeros, [Source("call", call, number)])
                    self._in_place.note_origin(memory_of(zeros), Source("call", call, number))
                    leaves[number] = zeros
        return unflatten(leaves, form)

    def _of_zeros(self, unit: Unit, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """What a unit computes, with its graph, if its parameters are zeros."""
        computing = _Computing(unit)
        with self._pausing(), runs.using(None):
            state = {name: torch.zeros_like(each, device=self._device) for name, each in computing.named_parameters()}
            return torch.func.functional_call(computing, state, arguments, dict(keywords))

    def _form(self, call: str, unit: Unit, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """What a unit returns on the meta device; of zeros where it reads values, or has tensors of other classes."""
        computing = _Computing(unit)
        mark = self._side_outputs.mark()
        tensors = dict((*computing.named_parameters(), *computing.named_buffers()))
        own = {name: tensor for name, tensor in tensors.items() if type(tensor) not in _PLAIN_TENSORS}
        places = [torch.device("meta"), torch.device("cpu")] if not own else [_place_of(unit, own)]
        for device in places:
            plain = {name: tensor for name, tensor in tensors.items() if name not in own}
            state = {name: torch.zeros_like(tensor, device=device) for name, tensor in plain.items()}
            moved = mapped(Tensor, _moved_to(device), (arguments, dict(keywords)))
            before, inside = held_by(moved), tensors_in(moved)
            versions = [torch_private.version(tensor) for tensor in inside]
            self._left.calling = call
            try:
                with put_back(unit):
                    output = torch.func.functional_call(computing, state | own, *moved)
            except CannotCut:
                raise
            except Exception:
                if device is places[-1]:
                    raise
                self._side_outputs.remove(mark)
            else:
                self._left.note(before, moved, (arguments, keywords))
                for given, tensor, version in zip(tensors_in((arguments, keywords)), inside, versions, strict=True):
                    if torch_private.version(tensor) != version:
                        self._kept.append(given)
                        key = memory_of(given)
                        self._sources[key] = {self._in_place.note(key, call, len(self._order) - 1)}
                return output
            finally:
                self._left.calling = ""
        raise AssertionError


class _Functions(TorchFunctionMode):
    """Shows a dry run the methods of tensors that are no operators."""

    def __init__(self, run: DryRun) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._run.before_function(func, args)
        return func(*args, **(kwargs or {}))


def _moved_to(device: torch.device) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.detach().to(device, copy=True)


def _place_of(unit: Unit, own: Mapping[str, Tensor]) -> torch.device:
    """Where a unit computes that has tensors of other classes, such as quantised weights: there are no zeros of these.

    Raises:
        CannotCut: they have no values.
    """
    for name, tensor in own.items():
        if tensor.is_meta:
            raise CannotCut(
                f"{unit.unit_name}.{name.removeprefix('unit.')} is a {type(tensor).__name__} on the meta device, and "
                "without values nobody but its library can say what it gives: load such weights before the model is "
                "cut, on each rank"
            )
    return next(iter(own.values())).device


class _Computing(nn.Module):
    """A unit without its hooks."""

    def __init__(self, unit: Unit) -> None:
        super().__init__()
        self.unit = unit

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """What the unit computes."""
        return self.unit.plain_forward(*arguments, **keywords)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors to which an operator writes; a batch norm writes its statistics, which its schema does not say."""
    if "batch_norm" in func.__name__ and "backward" not in func.__name__:
        return tensors_in(args[3:5]) if any(each is True for each in args[5:]) else []
    return torch_private.written_arguments(func, args, kwargs)
