r"""The split of a backward: which uses of which parameters can wait for the W half, and what waits.

    F   layers use an alias of the parameter        x ---- operator ---- y      the operator is run on the parameter's
                                                            |    \              memory without a graph to it
                                                          alias   hook
    I   autograd goes from y to x; the hook keeps (x, the gradient of y)
    W   the parameter's gradient is computed of what was kept, and added to the alias' buffer

The alias is a tensor of a class of its own, so that PyTorch asks it before an operator runs (`__torch_function__`). If
the operator is one of those in `split_operators` or `split_islands`, it is run so that nothing leads from its output to
the parameter, and a hook on the output keeps what the parameter's gradient needs. Every other operator runs as always,
and autograd forms its part of the gradient in I.

A parameter's gradient is exact to the last bit only if autograd's order of summing is kept: for one micro-batch first
over its uses, then over micro-batches. So it is put off as a whole or not at all. Which one it is, the first forward of
a pipe tells, in which nothing is put off. Should a parameter that is put off be used in another way in a later one,
then what autograd has formed in I is taken aside and added in W: the right gradient, summed in another order if there
are three uses or more. From the next mini-batch on it is not put off.

PyTorch does not ask before a `torch.autograd.Function` is applied to a parameter. Where operators that can be split use
that parameter, too, its gradient is right, but summed in another order.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor

from pipework import torch_private
from pipework.autograd.weight_split.islands import OPERATORS, island
from pipework.autograd.weight_split.operation import Operation, Parts, Postponing
from pipework.autograd.weight_split.operators import LOOKED_INTO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Queue = list[tuple[Operation | "_Formed", Tensor, Tensor]]  # what waits, what it has kept, its output's gradient

_without_subclass = torch_private.without_torch_function
_is_grad_enabled = torch.is_grad_enabled
_HOOKING: Final = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)


class SplitAlias(Postponing):
    """An alias leaf that is asked before an operator uses it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A layer that copies itself or its parameters gets plain tensors."""
        return copy.deepcopy(self.plain.detach().requires_grad_(), memo)

    @staticmethod
    def of(plain: Tensor, weight_store: WeightGradientStore, waits: bool | None) -> SplitAlias:
        """An alias of a parameter, of which `plain` is detached; it counts versions together with it."""
        alias = cast("SplitAlias", torch_private.make_subclass(SplitAlias, plain, True))
        alias.plain, alias.sizes, alias.type_of_values = plain, plain.shape, plain.dtype
        alias.weight_store, alias.waits, alias.casts = weight_store, waits, {}
        alias.is_factor = plain.dim() == 2 and plain.stride() == (plain.shape[1], 1)
        return alias

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """PyTorch's question."""
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # it asks while it traces, and nobody asks when the code runs
            with _without_subclass():
                return func(*args, **kwargs)
        operator = OPERATORS.get(func)
        # A transform of torch.func looks at one operator after the other by itself.
        if operator is not None and _is_grad_enabled() and not torch_private.in_transform():
            with _without_subclass():
                operation = operator(*args, **kwargs) or island(func, args, kwargs)
                if operation is not None:
                    return operation.parameters[0].weight_store.run(operation)
        elif func in LOOKED_INTO:
            return LOOKED_INTO[func](*args, **kwargs)
        with _without_subclass():
            result = func(*args, **kwargs)
            if func in _HOOKING:  # autograd is to call the hook with the gradient
                args[0].weight_store.note_other_use(args[0])
            else:
                _note_other_use(args[0] if func is Tensor.__setitem__ else result, args, kwargs)
        return result


def _note_other_use(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Marks the parameters from which something differentiable has been made."""
    made = result if isinstance(result, tuple | list) else (result,)
    # What a transform makes does not tell.
    if torch_private.in_transform() or any(
        isinstance(tensor, Tensor) and tensor.requires_grad and not tensor.is_leaf for tensor in made
    ):
        for alias in _aliases_in((*args, *kwargs.values())):
            alias.weight_store.note_other_use(alias)


def _aliases_in(values: Iterable[Any]) -> list[Postponing]:
    found: list[Postponing] = []
    for value in values:
        if isinstance(value, Postponing):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += _aliases_in(value)
    return found


class WeightGradientStore:
    """What one stage puts off in one mini-batch.

    Args:
        known: by the id of a parameter, whether its gradient is put off; what turns out is added.
    """

    def __init__(self, known: dict[int, bool]) -> None:
        self._known = known
        self._queues: dict[int, Queue] = {}
        self._mixed: dict[int, dict[int, Postponing]] = {}
        self._mixed_for_ever: set[int] = set()
        self._used: dict[int, Postponing] = {}
        self._otherwise: set[int] = set()
        # Of the operators that were run whole: the parameters that decide about it, and all.
        self._together: list[tuple[tuple[Postponing, ...], tuple[Postponing, ...]]] = []
        # The micro-batches in which it was not known yet of some parameters: a layer that recomputes itself in I must
        # do what it did in F.
        self._unknown: dict[int, frozenset[int]] = {}
        self._enter(-1, [], frozenset())

    def _enter(self, micro_batch: int, queue: Queue, unknown: frozenset[int]) -> None:
        self._micro_batch, self._queue, self._unknown_here = micro_batch, queue, unknown

    def known(self, parameter: Tensor) -> bool | None:
        """Whether a parameter's gradient is put off, as earlier mini-batches have shown; None: they have not."""
        return self._known.get(id(parameter))

    def begin(self, micro_batch: int) -> None:
        """A forward (or recomputation) of a micro-batch begins: its uses of parameters belong to it."""
        self._unknown.pop(micro_batch, None)
        queue = self._queues[micro_batch] = []
        self._enter(micro_batch, queue, frozenset())

    def run(self, operation: Operation) -> Tensor:
        """Runs an operator that can put gradients off, so that it does if it may. PyTorch does not ask meanwhile."""
        unknown = self._unknown_here
        for alias in operation.parameters:
            if not alias.requires_grad:  # a layer has frozen it for the moment
                return self._run_whole(operation)
            if not alias.waits or (unknown and id(alias) in unknown):
                if not operation.leave_out(alias):
                    return self._run_whole(operation)
                self._note_whole(alias, lasting=True)
        output = operation.run()
        operation.wait_in(self._queue)
        if output.requires_grad:
            _hook_gradient(output, operation)
        else:
            output = _Anchor.apply(output, operation.parameters[0], operation)  # type: ignore[no-untyped-call]
        return operation.shaped(output)

    def _run_whole(self, operation: Operation) -> Tensor:
        parameters = tuple([alias for alias in operation.parameters if alias.requires_grad])
        learning = any(alias.waits is None for alias in parameters)
        for alias in parameters:
            # Beside a parameter of which it is not known yet, one that waits does not for this micro-batch only.
            self._note_whole(alias, lasting=not learning)
        output = operation.run_whole()
        if learning:
            self._together.append((parameters[: operation.deciding], parameters))
            if output.grad_fn is not None:
                _hook_gradient(output, _Differentiable(self, parameters))
        return output

    def _note_whole(self, alias: Postponing, *, lasting: bool) -> None:
        if alias.waits is None:
            self._used[id(alias)] = alias
        elif alias.waits:
            self._note_mixed(alias, lasting=lasting)

    def note_other_use(self, alias: Postponing) -> None:
        """An operator has used a parameter in a way that puts nothing off."""
        if alias.waits is None:
            self._otherwise.add(id(alias))
        self._note_whole(alias, lasting=True)

    def _note_mixed(self, alias: Postponing, *, lasting: bool) -> None:
        if id(alias) not in self._unknown_here:
            self._mixed.setdefault(self._micro_batch, {})[id(alias)] = alias
            if lasting:
                self._mixed_for_ever.add(id(alias))

    def end(self) -> None:
        """The forward is over: what it has used has shown how."""
        if self._used:
            self._spread()
            for alias in self._used.values():
                alias.waits = id(alias) not in self._otherwise
            self._unknown[self._micro_batch] = self._unknown.get(self._micro_batch, frozenset()) | frozenset(self._used)
            self._used.clear()
            self._together.clear()

    def _spread(self) -> None:
        """An operator whose weight is not put off puts nothing off: nor are its other parameters, wherever used."""
        known = -1
        while known < len(self._otherwise):
            known = len(self._otherwise)
            for deciding, parameters in self._together:
                if any(alias.waits is False or id(alias) in self._otherwise for alias in deciding):
                    self._otherwise.update(map(id, parameters))

    def learn(self, parameters: Sequence[Tensor], aliases: Sequence[Tensor]) -> None:
        """After the mini-batch: which parameters are put off in the next."""
        for parameter, alias in zip(parameters, aliases, strict=True):
            if isinstance(alias, SplitAlias) and alias.waits is not None:
                self._known[id(parameter)] = alias.waits and id(alias) not in self._mixed_for_ever
        for gone in self._known.keys() - set(map(id, parameters)):  # another parameter may get that id
            del self._known[gone]

    def differentiate(self, micro_batch: int, backward: Callable[[], None]) -> None:
        """I: runs autograd; what it forms of a gradient that is put off is taken aside."""
        queue = self._queues[micro_batch]
        queue.clear()
        self._enter(micro_batch, queue, self._unknown.get(micro_batch, frozenset()))
        if micro_batch not in self._mixed:  # the usual case
            backward()
            self.end()  # of layers that have been computed in I only
            return
        mixed = list(self._mixed[micro_batch].values())
        before = [alias.grad for alias in mixed]
        for alias in mixed:
            alias.grad = None
        backward()
        self.end()
        for alias, gradient in zip(mixed, before, strict=True):
            if alias.grad is not None:
                queue.append((_Formed(alias), alias.grad, alias.grad))
            alias.grad = gradient

    def add_weight_gradients(self, micro_batch: int, *, again: bool) -> None:
        """W: forms the gradients that were put off, and adds them to the buffers.

        Args:
            micro_batch: whose.
            again: whether its backward may be run once more.
        """
        queue = self._queues[micro_batch] if again else self._queues.pop(micro_batch)
        if queue:
            with torch.no_grad(), _without_subclass():
                _add_gradients(queue)

    def kept(self, micro_batch: int) -> list[Tensor]:
        """What waits for the W of a micro-batch."""
        return [tensor for _, *pair in self._queues.get(micro_batch, ()) for tensor in pair]

    def clear(self) -> None:
        """Lets go of everything, after a failure."""
        for queue in self._queues.values():  # an operation knows the queue in which it waits
            queue.clear()
        self._queues.clear()
        self._mixed.clear()
        self._used.clear()
        self._together.clear()
        self._enter(-1, [], frozenset())


def _hook_gradient(output: Tensor, hook: Callable[[tuple[Tensor | None, ...]], None]) -> None:
    """Calls `hook` with the gradients that the node of `output` gets, after all hooks of the tensor itself.

    `Tensor.register_hook` would be called before hooks that the user registers later, which may change the gradient.
    """
    output.grad_fn.register_prehook(hook)  # type: ignore[union-attr]


def _add_gradients(queue: Queue) -> None:
    """Of each parameter the sum of its parts, as autograd forms it, is added to its buffer; the queue is used up.

    Parts that autocast has in another type are added up in that type first.
    """
    uses: dict[int, int] = {}
    for waiting, _, _ in queue:
        for alias in waiting.parameters:
            uses[id(alias)] = uses.get(id(alias), 0) + 1
    sums: dict[int, tuple[Postponing, Tensor]] = {}
    in_other_types: dict[tuple[int, torch.dtype], tuple[Postponing, Tensor]] = {}
    queue.reverse()
    while queue:
        waiting, kept, gradient = queue.pop()  # what is done with lets its memory go to what comes next
        for pair in waiting.gradients(kept, gradient):
            alias, part = pair
            if part.dtype is not alias.type_of_values:
                _add(in_other_types, (id(alias), part.dtype), pair)
            elif uses[id(alias)] == 1:  # the usual case, while the caches still have it
                _add_to_buffer(alias, part)
            else:
                _add(sums, id(alias), pair)
    for alias, part in in_other_types.values():
        _add(sums, id(alias), (alias, part.to(alias.type_of_values)))
    for alias, part in sums.values():
        _add_to_buffer(alias, part)


def _add(sums: dict[Any, tuple[Postponing, Tensor]], key: Any, pair: tuple[Postponing, Tensor]) -> None:
    before = sums.get(key)
    sums[key] = pair if before is None else (pair[0], before[1] + pair[1])


def _add_to_buffer(alias: Postponing, part: Tensor) -> None:
    if alias.grad is None:
        alias.grad = part
    else:
        alias.grad.add_(part)


class _Formed:
    """In the place of an operation: a part that autograd has formed already."""

    def __init__(self, alias: Postponing) -> None:
        self.parameters = (alias,)

    def gradients(self, kept: Tensor, gradient: Tensor) -> Parts:
        """The part itself."""
        return ((self.parameters[0], gradient),)


class _Differentiable:
    """Sees, while it is not known yet whether parameters are put off, that a layer differentiates a gradient."""

    def __init__(self, weight_store: WeightGradientStore, parameters: Sequence[Postponing]) -> None:
        self._weight_store, self._parameters = weight_store, parameters

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        if _is_grad_enabled():  # the graph of that gradient must lead to the parameters
            for alias in self._parameters:
                self._weight_store.note_other_use(alias)


class _Anchor(torch.autograd.Function):
    """Gives an output of which nothing needs a gradient but a parameter a place in the graph, for the hook."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, alias: Tensor, operation: Operation) -> Tensor:
        ctx.operation = operation
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.operation(gradients)
        return None, None, None
