"""Alias leaves: they stand in the modules in place of the user's parameters while a worker runs.

    the user's Parameter p           alias = p.detach().requires_grad_()          one per stage and mini-batch
      p.grad, its hooks, DDP           alias.grad: the stage's gradient buffer
            ^                                         |
            +--- one autograd node per stage ---------+   handed over once, when the user's backward() arrives

Workers may run backward before the user calls it, several times per mini-batch and at the same time as each other.
The user's parameters must not show it: their hooks fire once, with the whole gradient. So during a run the modules
hold aliases. An alias shares memory and version counter with its parameter: nothing is copied, and a parameter that
is changed before a retained backward is PyTorch's own error.

If a gradient comes to a leaf through views alone, PyTorch makes it the leaf's `.grad` without a copy, although another
tensor may have its memory (https://github.com/pytorch/pytorch/issues/34082). After

    x + (rows.unsqueeze(0) + columns.unsqueeze(0))

`rows.grad` and `columns.grad` are one memory, and the gradients of the next micro-batch would be added twice. It may
also be what this stage sends to another one, has received, or keeps for a `W`, or what a user's hook has kept: they
would see the sums. So the first gradient of each leaf is copied if anything else holds its memory (`SharedMemory`).
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Final

from torch import Tensor

from pipework import torch_private
from pipework.autograd.weight_split.store import WeightGradientAlias
from pipework.values.dtensor import is_dtensor, local_part

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from torch import nn

    from pipework.autograd.fully_sharded import FullySharded
    from pipework.autograd.stray_gradients import StrayGradients
    from pipework.autograd.weight_split.store import WeightGradientStore
    from pipework.runtime.stage.stage import Layer

# Of the process, since any two pipes may share a layer: held from the look at a stage's slots until they are taken.
_taking_slots: Final = threading.Lock()


class Aliases:
    """The alias leaves of one stage for one mini-batch.

    The modules are searched anew for each mini-batch, so a layer can be frozen, unfrozen or given another parameter
    between two mini-batches.

    Args:
        layers: of the stage.
        weight_store: defers gradients to W, and gives parameters of its operators aliases of its own class; None: the
            schedule has no W.
        stray: refuses gradients from outside of the pipe; None: not in this mini-batch.
        sharded: the parameters of the stage that FSDP shards; None: it shards none.

    Attributes:
        leaves: the aliases.
        parameters: those of the user, in the same order.
        sharded: as above.
        dtensor: one of the user's parameters that is a DTensor; None: no parameter is one.
    """

    __slots__ = ("_reduced", "_slots", "_stray", "dtensor", "leaves", "parameters", "sharded")

    def __init__(
        self,
        layers: Iterable[nn.Module],
        weight_store: WeightGradientStore | None = None,
        stray: StrayGradients | None = None,
        sharded: FullySharded | None = None,
    ) -> None:
        self.sharded = sharded
        self._reduced: dict[int, Tensor] = {}  # the gradients of shards, by the id of the leaf
        by_parameter: dict[int, tuple[Tensor, Tensor]] = {}
        self.dtensor: Tensor | None = None
        self._slots: list[tuple[dict[str, Tensor | None], str, Tensor, Tensor]] = []
        found = [
            (slots, name, parameter, compiled)
            for slots, compiled in _parameter_dicts(layers)
            for name, parameter in slots.items()
            if parameter is not None and parameter.requires_grad
        ]
        # Compiled code calls no __torch_function__.
        compiled_parameters = {id(parameter) for _, _, parameter, compiled in found if compiled}
        for slots, name, parameter, _ in found:
            if id(parameter) not in by_parameter:
                _refuse_foreign_alias(parameter)
                # The memory of a shard is not what layers compute with.
                held = parameter if sharded is None or not sharded.has(parameter) else sharded.whole(parameter)
                plain = held.detach()
                own_class = type(plain) is not Tensor
                if (own_class or held is not parameter) and is_dtensor(parameter):
                    self.dtensor = parameter
                # A subclass of Tensor may have operators of its own.
                whole = (own_class and not is_dtensor(plain)) or id(parameter) in compiled_parameters
                deferred = None if weight_store is None else weight_store.known(parameter)
                if weight_store is None or whole or deferred is False:
                    alias = plain.requires_grad_()
                elif own_class:
                    from pipework.autograd.weight_split.dtensor_alias import dtensor_alias  # imports DTensor

                    alias = dtensor_alias(plain, weight_store, deferred)
                else:
                    alias = WeightGradientAlias.of(plain, weight_store, deferred)
                by_parameter[id(parameter)] = (parameter, alias)
            self._slots.append((slots, name, parameter, by_parameter[id(parameter)][1]))
        self.parameters = [parameter for parameter, _ in by_parameter.values()]
        self.leaves = [alias for _, alias in by_parameter.values()]
        self._stray = stray
        if stray is not None:
            stray.watch(self.leaves)

    @property
    def any_deferrable(self) -> bool:
        """Whether the gradient of any parameter can be deferred."""
        return any(isinstance(leaf, WeightGradientAlias) for leaf in self.leaves)

    @property
    def versions(self) -> list[int]:
        """Differs after a parameter has been changed in place."""
        return list(map(torch_private.version, self.parameters))  # parameters and aliases share version counters

    def has_memory_of(self, output: Tensor) -> bool:
        """Whether an output is one of these aliases, or a view of one.

        PyTorch refuses to change it in place, and after a cut of the graph would not know it any more.
        """
        base = torch_private.viewed(output)
        source = output if base is None else base
        return source.is_leaf and source.requires_grad and any(source is leaf for leaf in self.leaves)

    def standing_in(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the modules hold these aliases; see `standing_in`."""
        return standing_in([self])

    def named(self, layers: Iterable[Layer]) -> Iterator[tuple[str, Tensor]]:
        """The aliases with the names of their parameters in the un-partitioned module."""
        by_slot = {(id(slots), name): alias for slots, name, _, alias in self._slots}
        for layer in layers:
            for prefix, module in layer.module.named_modules(prefix=layer.name):
                for name in module._parameters:
                    if (id(module._parameters), name) in by_slot:
                        yield f"{prefix}.{name}", by_slot[id(module._parameters), name]

    def take_gradients(self) -> list[Tensor | None]:
        """The gradient of each parameter, None where it got none.

        No reference is kept, so autograd may make these tensors the parameters' `.grad` without a copy.
        """
        gradients = self.gradients()
        for alias in self.leaves:
            alias.grad = None
        self._reduced.clear()
        return gradients

    def gradients(self) -> list[Tensor | None]:
        """The gradient of each parameter; they stay here."""
        if self._reduced:
            return [self._reduced.get(id(alias), alias.grad) for alias in self.leaves]
        return [alias.grad for alias in self.leaves]

    def set_reduced(self, gradients: dict[int, Tensor]) -> None:
        """The gradients of shards are there.

        Args:
            gradients: by the ids of leaves.
        """
        self._reduced = gradients

    def gather(self) -> None:
        """UNSHARD: the modules hold whole parameters, or their aliases, from now on."""
        if self.sharded is not None and not self.sharded.is_whole:
            self.sharded.gather()
            for slots, name, parameter, alias in self._slots:
                if self.sharded.has(parameter):
                    slots[name] = alias

    def reshard(self) -> None:
        """RESHARD: they hold shards again, whose whole parameters have no memory."""
        if self.sharded is not None:
            self.sharded.reshard()


@contextlib.contextmanager
def standing_in(several: Sequence[Aliases], gathered_later: Collection[Aliases] = ()) -> Iterator[None]:
    """A context in which the modules of several stages hold their aliases in place of their parameters.

    Afterwards each module holds what it held before, also if that is no longer the parameter found at first.

    Args:
        several: those of the stages.
        gathered_later: those stages whose sharded parameters the schedule gathers later.

    Raises:
        RuntimeError: another pipe is running one of the layers at the same time.
    """
    thread = threading.get_ident()
    taken: list[tuple[dict[str, Tensor | None], str, Tensor, Tensor | None]] = []
    try:
        with _taking_slots:
            for aliases in several:
                if aliases._stray is not None:
                    aliases._stray.running = True
                for slots, name, parameter, alias in aliases._slots:
                    present = slots.get(name)
                    if present is not parameter and present is not None:
                        _refuse_foreign_alias(present)
                    alias.pipework_thread = thread  # type: ignore[attr-defined]
                    taken.append((slots, name, alias, present))
                    slots[name] = alias
        for aliases in several:
            if aliases not in gathered_later:
                aliases.gather()
        yield
    finally:
        for aliases in several:
            if aliases._stray is not None:
                aliases._stray.running = False
            aliases.reshard()
        for slots, name, alias, present in reversed(taken):
            if slots.get(name) is alias:  # a layer that replaced its own parameter keeps what it put there
                slots[name] = present


def _refuse_foreign_alias(found: Tensor) -> None:
    """Refuses an alias of another thread. One of this thread is right: then a pipe is a layer of another pipe."""
    if (
        type(found) in (Tensor, WeightGradientAlias)
        and getattr(found, "pipework_thread", threading.get_ident()) != threading.get_ident()
    ):
        raise RuntimeError(
            "another pipe is running a layer that this pipe has, too; pipes that share layers can be called one after "
            "the other, not at the same time"
        )


def _parameter_dicts(layers: Iterable[nn.Module]) -> Iterable[tuple[dict[str, Tensor | None], bool]]:
    """The parameter dictionaries of all modules below, each once, and whether a compiled module uses them.

    Faster than `named_parameters`, which also builds names.
    """
    found: dict[int, tuple[dict[str, Tensor | None], bool]] = {}
    stack = [(layer, False) for layer in list(layers)[::-1]]
    while stack:
        module, compiled = stack.pop()
        compiled = compiled or torch_private.is_compiled(module)
        if id(module) in found and found[id(module)][1] >= compiled:
            continue
        found[id(module)] = module._parameters, compiled  # type: ignore[assignment]
        stack.extend([(child, compiled) for child in reversed(module._modules.values()) if child is not None])
    return found.values()


class SharedMemory:
    """The memory of the gradients of some leaves, in one mini-batch.

    Args:
        leaves: that have no gradient yet.

    Attributes:
        pending: those of them that have had no gradient so far. Once there is one, PyTorch adds to it in place.

    Example:
        >>> import torch
        >>> rows, columns = torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)
        >>> memory = SharedMemory([rows, columns])
        >>> for micro_batch in range(2):
        ...     (rows.unsqueeze(0) + columns.unsqueeze(0)).sum().backward()
        ...     memory.separate()
        >>> rows.grad, columns.grad
        (tensor([2., 2., 2.]), tensor([2., 2., 2.]))
    """

    __slots__ = ("pending",)

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self.pending = leaves

    def separate(self) -> None:
        """After a backward, while the caller has what it began with and what it gave to other tensors.

        Each `.grad` must be a tensor of its own, as autograd makes it: what is counted are the tensors of a memory.
        """
        still_pending = []
        for leaf in self.pending:
            if leaf.grad is None:
                still_pending.append(leaf)
            elif torch_private.is_held_elsewhere(local_part(leaf.grad)):
                leaf.grad = leaf.grad.clone()
        self.pending = still_pending
