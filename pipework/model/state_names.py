"""Names of tensors in a state dict of layers; parts of a model have the model's own names, wherever it was cut.

By patterns of these names a user says of which parameters and buffers each process has its own values.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from pipework import torch_private

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

_PREFIX: Final = "state_prefix"  # attribute of a part of a model: the first letters of the part's own names of tensors


def state_name(layers: Mapping[str, Any], name: str) -> str:
    """The name of a tensor or a module in a state dict.

    Args:
        layers: by their names.
        name: that the layers' container has for it.

    Example:
        >>> from torch import nn
        >>> state_name({"0": nn.Linear(2, 2)}, "0.weight")
        '0.weight'
        >>> part = nn.Sequential()
        >>> part.state_prefix = "model."
        >>> state_name({"0": part}, "0.model.layers.3.weight")
        'layers.3.weight'
    """
    layer, _, rest = name.partition(".")
    prefix = getattr(layers.get(layer), _PREFIX, None)
    if prefix is None:
        return name
    rest = rest.removeprefix(f"{torch_private.COMPILED_MODULE}.")
    return rest.removeprefix(prefix) if rest.startswith(prefix) else name


def has_own_names(layers: Mapping[str, Any]) -> bool:
    """Whether any of the layers is a part of a model."""
    return any(hasattr(layer, _PREFIX) for layer in layers.values())


def state_tensors(container: nn.Module) -> dict[str, list[Tensor]]:
    """The parameters and buffers of layers by their names in a state dict.

    Parts have copies of the buffers that stand beside the model's units, so that a name may be that of several tensors.

    Example:
        >>> from torch import nn
        >>> list(state_tensors(nn.Sequential(nn.Linear(2, 2))))
        ['0.weight', '0.bias']
    """
    found: dict[str, list[Tensor]] = {}
    parameters = container.named_parameters(remove_duplicate=False)
    for name, tensor in (*parameters, *container.named_buffers(remove_duplicate=False)):
        same = found.setdefault(state_name(container._modules, name), [])
        if all(tensor is not each for each in same):
            same.append(tensor)
    return found


Dimensions = tuple[str, ...] | None
"""Names of dimensions of a mesh; None: all dimensions."""


def patterns_of(given: Sequence[str] | Mapping[str, str | Sequence[str]]) -> dict[str, Dimensions]:
    """What a user has given, in one form: for each pattern the dimensions over which its parameters are local.

    Raises:
        TypeError: it is neither a sequence of texts nor a mapping from texts to one text or several.

    Example:
        >>> patterns_of(["*.experts.*"]), patterns_of({"*.experts.*": "ep"})
        ({'*.experts.*': None}, {'*.experts.*': ('ep',)})
    """
    patterns = None if isinstance(given, str) else texts_of(given)
    if patterns is not None:
        found = {each: texts_of(given[each]) if isinstance(given, Mapping) else None for each in patterns}
        if not isinstance(given, Mapping) or all(found.values()):
            return found
    raise TypeError(
        "local_parameters is a list of names, such as ['*.experts.*'], or says over which dimensions of the mesh they "
        f"are local, such as {{'*.experts.*': 'ep'}}: got {given!r}"
    )


def texts_of(given: object) -> tuple[str, ...] | None:
    """One text or several, as a tuple; None: it is something else.

    Example:
        >>> texts_of("dp"), texts_of(["dp", "ep"]), texts_of(5), texts_of([5])
        (('dp',), ('dp', 'ep'), None, None)
    """
    every = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (None,)
    return every if all(isinstance(each, str) for each in every) else None


def local_dimensions(module: nn.Sequential, patterns: Mapping[str, Dimensions]) -> dict[str, Dimensions]:
    """The parameters and buffers that match any of the patterns, in which ``*`` stands for any characters.

    Returns:
        By each of their names, the dimensions over which they are local: those of all patterns that match any of the
        names, since a tied parameter has several.

    Raises:
        ValueError: a pattern matches nothing of the model.

    Example:
        >>> from torch import nn
        >>> local_dimensions(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), {"1.*": ("ep",), "1.b*": None})
        {'1.weight': ('ep',), '1.bias': None}
    """
    if not patterns:
        return {}
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    names = {state_name(module._modules, name): tensor for name, tensor in tensors}
    over_of: dict[int, Dimensions] = {}
    for pattern, over in patterns.items():
        matching = fnmatch.filter(names, pattern)
        if not matching:
            some = ", ".join([*names][:3]) + (", ..." if len(names) > 3 else "")
            raise ValueError(f"local_parameters has {pattern!r}, which matches no parameter of the model: {some}")
        for name in matching:
            before = over_of.get(id(names[name]), ())
            both = None if over is None or before is None else tuple(sorted({*before, *over}))
            over_of[id(names[name])] = both
    return {name: over_of[id(tensor)] for name, tensor in names.items() if id(tensor) in over_of}
