"""Plain values in the form of JSON: exact, and nothing is run to read them.

None, True, False, strings and machine-sized integers stand for themselves. Anything else is a list that begins with the
name of its kind, such as `["float", "0x1.8p+0"]`.
"""

from __future__ import annotations

import base64
from enum import Enum, Flag
from types import EllipsisType, MappingProxyType
from typing import Any

import torch

from pipework.values import classes

DTYPES = MappingProxyType({str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)})
TRAVEL = (
    "None, bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device, slice, range, ... and members "
    "of enums"
)
KINDS = (bool, int, float, complex, str, bytes, EllipsisType, torch.Size, torch.dtype, torch.device)


def encode(value: Any) -> Any:
    """A plain value, or a tuple of such, as what `json` can write.

    Raises:
        TypeError: the value is none of the kinds that travel.

    Example:
        >>> encode((1, 1.5))
        ['tuple', 1, ['float', '0x1.8000000000000p+0']]
    """
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**63 else ["int", hex(value)]  # JSON readers limit the digits
    if kind is str:
        return _text(value)
    if kind is float:
        return ["float", value.hex()]
    if kind is complex:
        return ["complex", value.real.hex(), value.imag.hex()]
    if kind is bytes:
        return ["bytes", base64.b64encode(value).decode()]
    if kind is tuple or kind is torch.Size:
        return [kind.__name__, *map(encode, value)]
    if kind is torch.dtype or kind is torch.device:
        return [kind.__name__, str(value)]
    if kind is slice or kind is range:
        return [kind.__name__, encode(value.start), encode(value.stop), encode(value.step)]
    if value is Ellipsis:
        return ["Ellipsis"]
    if isinstance(value, Enum):
        return _member(value)
    raise TypeError(f"a value of type {kind.__module__}.{kind.__qualname__}")


def decode(form: Any) -> Any:
    """The plain value of what `encode` gave.

    Raises:
        ValueError: what arrived is malformed, or tells of a class that this process does not know.

    Example:
        >>> decode(encode((1, 1.5)))
        (1, 1.5)
    """
    if form is None or isinstance(form, (bool, int, str)):
        return form
    match form:
        case ["int", str(digits)]:
            return int(digits, 16)
        case ["str", str(data)]:
            return base64.b64decode(data, validate=True).decode("utf-8", "surrogatepass")
        case ["float", str(digits)]:
            return float.fromhex(digits)
        case ["complex", str(real), str(imaginary)]:
            return complex(float.fromhex(real), float.fromhex(imaginary))
        case ["bytes", str(data)]:
            return base64.b64decode(data, validate=True)
        case ["tuple", *inner]:
            return tuple(map(decode, inner))
        case ["Size", *inner]:
            return torch.Size(map(decode, inner))
        case ["dtype", str(name)]:
            return DTYPES[name]
        case ["device", str(name)]:
            return torch.device(name)
        case ["slice", start, stop, step]:
            return slice(decode(start), decode(stop), decode(step))
        case ["range", start, stop, step]:
            return range(decode(start), decode(stop), decode(step))
        case ["Ellipsis"]:
            return ...
        case ["enum", name, *members]:
            return _read_member(classes.named(name), members)
    raise ValueError(f"{str(form)[:80]!r} stands for no plain value")


def key(value: Any) -> Any:
    """A key of a dict, like `encode`.

    Raises:
        TypeError: the key is none of the kinds that travel.
    """
    if not _is_key(value):
        raise TypeError(f"a key of type {type(value).__module__}.{type(value).__qualname__}")
    return encode(value)


def keys(forms: list[Any]) -> list[Any]:
    """The keys of one dict, which all differ.

    Raises:
        ValueError: they do not, or are nothing that can be a key.
    """
    found = list(map(decode, forms))
    if not all(map(_is_key, found)) or len(dict.fromkeys(found)) != len(found):
        raise ValueError("a dict arrives with impossible keys")
    return found


def _text(value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: JSON would join it with a neighbour
        return ["str", base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()]
    return value


def _is_key(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_key, value))
    return value is None or type(value) in KINDS or isinstance(value, Enum)


def _member(value: Enum) -> list[Any]:
    kind = type(value)
    members = [value] if value.name in kind.__members__ else [*value] if isinstance(value, Flag) else []
    names = [str(member.name) for member in members]
    if _joined(kind, names) is not value:
        raise TypeError(f"a value of type {kind.__module__}.{kind.__qualname__} that is no member of it")
    return ["enum", classes.name(kind), *names]


def _joined(kind: type[Enum], names: list[str]) -> Any:
    """The member of that name, or the flag with those bits."""
    if len(names) == 1:
        return kind.__members__[names[0]]
    joined: Any = kind(0)
    for name in names:
        joined |= kind.__members__[name]
    return joined


def _read_member(kind: type, names: list[Any]) -> Any:
    if not issubclass(kind, Enum) or (len(names) != 1 and not issubclass(kind, Flag)):
        raise ValueError(f"{kind.__module__}.{kind.__qualname__} is no enum with such members")
    return _joined(kind, names)
