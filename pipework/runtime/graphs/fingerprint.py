"""What graphs take for granted of the layers: it is compared before each step, since a graph runs no Python.

    parameters    the same tensors at the same addresses, with the same requires_grad
    modules       the same children, hooks, attributes but for lists and dictionaries
    generators    in the same states: those of Python and NumPy that are attributes
    buffers       the same tensors: a forward changes them in place

If anything else is found, the step is captured anew.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from pipework import torch_private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Set

    from torch import Tensor, nn

_PLAIN: Final = (bool, int, float, str, type(None))  # equal ones are the same; of all others, an object is itself


class _Place(NamedTuple):
    """What graphs have of a tensor: where it lies, and how often it was changed where its values are in graphs."""

    address: int = 0
    requires_grad: bool = False
    version: int = 0


class Fingerprint:
    """The state of some modules that graphs have been captured with.

    Args:
        modules: with their names; those inside of them count, too.
        kinds: the types of the devices that have graphs. The values of tensors elsewhere are in the graphs, too.

    Example:
        >>> from torch import nn
        >>> layer = nn.Dropout(0.1)
        >>> before = Fingerprint([("0", layer)], {"cuda"})
        >>> before.difference(), setattr(layer, "p", 0.2), before.difference()
        ('', None, "attribute 'p' of layer '0' (Dropout) was 0.1 and is 0.2")
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], kinds: Set[str]) -> None:
        named = {
            each: f"layer {path!r} ({type(each).__name__})"
            for name, module in modules
            for path, each in module.named_modules(prefix=name)
        }
        self._attributes: list[tuple[dict[str, Any], str, Any, str]] = []
        self._sizes: list[tuple[dict[str, Any], int, str]] = []
        self._tensors: list[tuple[dict[str, Any], str, Tensor | None, _Place, str]] = []
        self._kinds = kinds
        self._generators: list[tuple[Any, str, str]] = []
        self._hooks: list[tuple[nn.Module, list[Callable[..., Any]], str]] = []
        for module, text in named.items():
            own = vars(module)
            for what, held in (("parameter", module._parameters), ("buffer", module._buffers)):
                self._sizes.append((held, len(held), f"the {what}s of {text}"))
                self._tensors += [
                    (held, name, each, self._place(each), f"{what} {name!r} of {text}") for name, each in held.items()
                ]
            self._sizes.append((own, len(own), f"the attributes of {text}"))
            for name, value in own.items():
                if isinstance(value, torch.Tensor):
                    self._tensors.append((own, name, value, self._place(value), f"attribute {name!r} of {text}"))
                elif not isinstance(value, list | dict):  # what is in these counts, and nobody sees it
                    self._attributes.append((own, name, value, f"attribute {name!r} of {text}"))
                if isinstance(value, random.Random) or type(value).__module__.startswith("numpy.random"):
                    self._generators.append((value, _state(value), f"generator {name!r} of {text}"))
            children: dict[str, Any] = module._modules
            self._sizes.append((children, len(children), f"the children of {text}"))
            self._attributes += [(children, name, each, f"child {name!r} of {text}") for name, each in children.items()]
            self._hooks.append((module, torch_private.all_hooks(module), text))

    @property
    def hooked(self) -> str:
        """A layer that has hooks, which a graph does not call; empty: there is none.

        Hooks that only hand tensors on, so that the graph has all that they do, have the attribute `pipework_in_graph`.
        """
        for _, hooks, text in self._hooks:
            if not all(getattr(hook, "pipework_in_graph", False) for hook in hooks):
                return text
        return ""

    def difference(self) -> str:
        """What is not as it was, for messages; empty: everything is."""
        for held, size, text in self._sizes:
            if len(held) != size:
                return f"{text} were {size} and are {len(held)}"
        for held, name, value, text in self._attributes:
            now = held.get(name, self)
            if now is not value and (type(now) is not type(value) or type(now) not in _PLAIN or now != value):
                return f"{text} was {value!r} and is {now!r}" if type(value) in _PLAIN else f"{text} was replaced"
        for held, name, tensor, (address, required, version), text in self._tensors:
            now = held.get(name)
            if now is not tensor:
                return f"{text} was replaced"
            if now is None:
                continue
            present = self._place(now)
            if present.address != address:
                return f"{text} was replaced"
            if present.requires_grad != required:
                return f"requires_grad of {text} was {required} and is {now.requires_grad}"
            if present.version != version:
                return f"{text}, a tensor on {now.device}, was changed"
        for generator, state, text in self._generators:
            if _state(generator) != state:
                return f"the state of {text} was changed"
        for module, hooks, text in self._hooks:
            if torch_private.all_hooks(module) != hooks:
                return f"the hooks of {text} have changed"
        return ""

    def _place(self, tensor: Tensor | None) -> _Place:
        if tensor is None:
            return _Place()
        is_read = tensor.device.type not in self._kinds and not tensor.is_inference()
        return _Place(tensor.data_ptr(), tensor.requires_grad, torch_private.version(tensor) if is_read else 0)


def _state(generator: Any) -> str:
    """The state of a generator of Python or NumPy, whose arrays are short enough to be shown whole."""
    if isinstance(generator, random.Random):
        return repr(generator.getstate())
    if hasattr(generator, "get_state"):
        return repr(generator.get_state())
    return repr(getattr(generator, "bit_generator", generator).state)
