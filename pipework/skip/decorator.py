"""The decorator that lets the layers of a sequential model pass tensors past each other.

A skippable layer's forward is a generator. It yields commands to the `Skippable` module that runs it:

    forward of the layer            Skippable                     tracker of the thread
    yield stash("a", x)     --->    is "a" declared?      --->    save
    y = yield pop("b")      --->    is "b" declared?      --->    load
            y               <---                          <---
    return z                --->    is anything missing?          (z is the output)

The tracker keeps the tensors: outside of a pipe in a dictionary, inside of a pipe through the pipe's transport. So the
same layers run with and without a pipe.
"""

from __future__ import annotations

import functools
import sys
import uuid
from dataclasses import dataclass, field
from types import GeneratorType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import Tensor, nn

from pipework.runtime.skips import skip_tracker

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping


@dataclass(frozen=True, order=True, slots=True)
class Namespace:
    """Distinguishes the skip connections of some layers from others of the same name.

    Each new namespace differs from all others, also from those of other processes. Copies of a namespace equal it, so
    the layers of a copied or unpickled model stay connected. Namespaces are hashable and ordered.

    Example:
        >>> import copy
        >>> namespace = Namespace()
        >>> namespace == Namespace(), namespace == copy.deepcopy(namespace)
        (False, True)
    """

    identity: str = field(default_factory=lambda: uuid.uuid4().hex, init=False)


SkipKey = tuple[Namespace | None, str]
"""Identifies a skip connection: its namespace (None without `isolate`) and its name."""


@dataclass(frozen=True, slots=True, eq=False)
class stash:
    """The command to stash a tensor: `yield stash(name, tensor)`.

    Args:
        name: the name of the skip connection, declared in `@skippable(stash=[...])`.
        tensor: the tensor for the layers that pop; None is passed on as None.

    Example:
        >>> def forward(self, x):
        ...     yield stash("identity", x)
        ...     return x.relu()
    """

    name: str
    tensor: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class pop:
    """The command to get the tensor that an earlier layer has stashed: `tensor = yield pop(name)`.

    Args:
        name: the name of the skip connection, declared in `@skippable(pop=[...])`.

    Example:
        >>> def forward(self, x):
        ...     identity = yield pop("identity")
        ...     return x + identity
    """

    name: str


class Skippable(nn.Module):
    """The base class of all classes that `skippable` makes. It holds the decorated module and carries out its commands.

    Attributes:
        module: the instance of the decorated class.
        module_class: the decorated class.
        stashable_names: the names that the layer stashes.
        poppable_names: the names that it pops.
    """

    module_class: ClassVar[type[nn.Module]]
    stashable_names: ClassVar[tuple[str, ...]]
    poppable_names: ClassVar[tuple[str, ...]]
    module: nn.Module

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = self.module_class(*args, **kwargs)
        self._namespaces: dict[str, Namespace] = {}
        self._poppers: dict[str, int] | None = None  # None: not counted yet

    def __repr__(self) -> str:
        return f"@skippable({self.module})"

    def isolate(self, ns: Namespace, *, only: Iterable[str] | None = None) -> Self:
        """Puts this layer's skip connections into a namespace.

        Args:
            ns: the namespace, where they are set apart from those of the same name.
            only: the names that are meant; None: all that the layer declares.

        Returns:
            The layer itself.

        Raises:
            ValueError: the layer does not declare a name in `only`.

        Example:
            >>> from pipework.skip import Namespace
            >>> @skippable(stash=["identity"])
            ... class Fork(nn.Module):
            ...     def forward(self, x):
            ...         yield stash("identity", x)
            ...         return x
            >>> namespace = Namespace()
            >>> list(Fork().isolate(namespace).stashed_keys()) == [(namespace, "identity")]
            True
        """
        declared = self.stashable_names + self.poppable_names
        names = declared if only is None else _checked_names("only", only)
        if undeclared := [name for name in names if name not in declared]:
            raise ValueError(
                f"cannot isolate {_quoted(undeclared)}: this layer declares {_quoted(declared) or 'no names'}"
            )
        self._namespaces.update(dict.fromkeys(names, ns))
        self._poppers = None
        return self

    def stashed_keys(self) -> Iterator[SkipKey]:
        """The declared skip connections that begin here, as namespace (None without `isolate`) and name."""
        return ((self._namespaces.get(name), name) for name in self.stashable_names)

    def popped_keys(self) -> Iterator[SkipKey]:
        """The declared skip connections that end here, as namespace (None without `isolate`) and name."""
        return ((self._namespaces.get(name), name) for name in self.poppable_names)

    def note_poppers(self, counts: Mapping[SkipKey, int]) -> None:
        """Sets how many layers of the model pop each skip connection; see `verify_skippables`."""
        self._poppers = {key[1]: counts[key] for key in self.stashed_keys()}

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Runs the decorated module and carries out the commands that it yields."""
        result = self.module(*inputs, **keywords)
        stashed: set[str] = set()
        popped: set[str] = set()
        if isinstance(result, GeneratorType):
            result = self._obey(result, stashed, popped)
        for what, names, done in (("stashed", self.stashable_names, stashed), ("popped", self.poppable_names, popped)):
            if missing := [name for name in names if name not in done]:
                raise RuntimeError(f"{_quoted(missing)} must be {what} but have not")
        return result

    def _obey(self, commands: Generator[Any, Tensor | None, Any], stashed: set[str], popped: set[str]) -> Any:
        """Carries out all commands and returns what the generator returns."""
        reply: Tensor | None = None
        try:
            while True:
                command, reply = commands.send(reply), None
                if isinstance(command, stash):
                    self._stash(command.name, command.tensor, stashed)
                elif isinstance(command, pop):
                    reply = self._pop(command.name, popped)
                else:
                    raise TypeError(f"{command!r} is not a command from @skippable")
        except StopIteration as end:
            return end.value

    def _stash(self, name: str, tensor: Tensor | None, stashed: set[str]) -> None:
        _refuse_undeclared(name, "stash", self.stashable_names, stashed)
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(f"'{name}' must be stashed as a tensor or None, not as {type(tensor).__name__}")
        poppers = 1 if self._poppers is None else self._poppers[name]
        skip_tracker.current().save((self._namespaces.get(name), name), tensor, poppers)
        stashed.add(name)

    def _pop(self, name: str, popped: set[str]) -> Tensor | None:
        _refuse_undeclared(name, "popp", self.poppable_names, popped)
        try:
            tensor = skip_tracker.current().load((self._namespaces.get(name), name))
        except KeyError:
            error = RuntimeError(f"'{name}' has not been stashed")
            if self._poppers is None:
                error.add_note(
                    f"If several layers pop '{name}', call verify_skippables(model) once before the model runs: "
                    "it counts them, and the tensor is then kept until the last of them has popped it."
                )
            raise error from None
        popped.add(name)
        return tensor


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Decorates a layer that stashes tensors for later layers, or pops tensors that earlier layers have stashed.

    The layer declares the names, and its forward yields `stash` and `pop` commands. Each name is stashed by one layer
    and popped by one or more; `Namespace` allows a name to be used again. In a pipe the tensor goes directly from the
    stage that stashes it to the stages that pop it. Without a pipe the layers work unchanged; if several of them pop
    the same tensor, call `verify_skippables` once before.

    The decorated module is the submodule `module` of the new class's instances, so its parameters have names such as
    `module.weight`. Used as `@skippable(...)` above a class, the result can be pickled.

    Args:
        stash: the names that the layer stashes.
        pop: the names that it pops.

    Returns:
        A decorator of subclasses of `nn.Module`.

    Example:
        >>> import torch
        >>> from pipework.skip import pop, stash
        >>> @skippable(stash=["identity"])
        ... class Fork(nn.Module):
        ...     def forward(self, x):
        ...         yield stash("identity", x)
        ...         return 10 * x
        >>> @skippable(pop=["identity"])
        ... class Join(nn.Module):
        ...     def forward(self, x):
        ...         identity = yield pop("identity")
        ...         return x + identity
        >>> nn.Sequential(Fork(), nn.ReLU(), Join())(torch.ones(2))
        tensor([11., 11.])
    """
    stashable_names, poppable_names = _checked_names("stash", stash), _checked_names("pop", pop)

    def decorate(module_class: type[nn.Module]) -> type[Skippable]:
        @functools.wraps(module_class.forward)  # so that inspect.signature shows the signature of the user's forward
        def forward(self: Skippable, *inputs: Any, **keywords: Any) -> Any:
            return Skippable.forward(self, *inputs, **keywords)

        decorated = type(
            module_class.__name__,
            (Skippable,),
            {
                "__doc__": module_class.__doc__,
                "__module__": module_class.__module__,
                "__qualname__": module_class.__qualname__,
                "forward": forward,
                "module_class": module_class,
                "poppable_names": poppable_names,
                "stashable_names": stashable_names,
            },
        )
        if not _is_known_by_name(module_class):
            # The new class gets the name of the decorated one, which pickle must find under another name.
            module_class.__qualname__ = f"{decorated.__qualname__}.module_class"
        return decorated

    return decorate


def _is_known_by_name(module_class: type) -> bool:
    found: Any = sys.modules.get(module_class.__module__)
    for name in module_class.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is module_class


def _checked_names(argument: str, names: Iterable[str]) -> tuple[str, ...]:
    if isinstance(names, type):
        raise TypeError(f"class {names.__name__} was given as {argument}: write @skippable(stash=[...], pop=[...])")
    if isinstance(names, str):
        raise TypeError(f"{argument} must be a list of names, but it is the string '{names}': write [{names!r}]")
    return tuple(dict.fromkeys(names))


def _refuse_undeclared(name: str, what: str, declared: Iterable[str], done: Iterable[str]) -> None:
    if name not in declared:
        raise RuntimeError(f"'{name}' has not been declared as {what}able")
    if name in done:
        raise RuntimeError(f"'{name}' has already been {what}ed by this layer")


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
