"""Profiles as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from pipework.planning.json_file import read_json
from pipework.planning.profiles.layer_costs import DeviceKind, LayerBytes, LayerInfo, LayerSeconds, LinkSpeed, SkipBytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipework.planning.profiles.profile import Profile

_FORMAT: Final = "pipework profile 1"


def text_of(profile: Profile) -> str:
    """Write a profile, a line for each layer."""
    kinds = {
        name: {
            "memory": kind.memory,
            "estimated": kind.estimated,
            "joined": list(kind.joined),
            "seconds": [_Lines(map(list, row)) for row in kind.seconds],
        }
        for name, kind in profile.kinds.items()
    }
    fields = {
        "format": _FORMAT,
        "batch": profile.batch,
        "rows": list(profile.rows),
        "loss_inside": profile.loss_inside,
        "devices": dict(profile.devices),
        "links": [[*ends, *link] for ends, link in profile.links.items()],
        "skips": [[each.source, each.target, list(each.size)] for each in profile.skips],
        "columns": {
            "layers": list(LayerInfo._fields), "bytes": list(LayerBytes._fields), "seconds": list(LayerSeconds._fields),
        },
        "layers": _Lines(map(list, profile.layers)),
        "bytes": [_Lines(map(list, row)) for row in profile.bytes],
        "kinds": kinds,
    }  # fmt: skip
    return _text(fields, 0) + "\n"


def parse(text: str, name: str, make: Callable[..., Profile]) -> Profile:
    """Read what :func:`text_of` wrote.

    Args:
        text: JSON.
        name: of its file, for messages.
        make: makes it of its attributes.

    Raises:
        ValueError: it is not JSON, or not that of a profile.
    """
    return read_json(
        text,
        name,
        "profile",
        _FORMAT,
        "pipework.planning.profile(model, sample).save(path)",
        lambda fields: make(**_made(fields)),
    )


def _made(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "batch": fields["batch"],
        "rows": tuple(fields["rows"]),
        "layers": tuple(LayerInfo(*each) for each in fields["layers"]),
        "bytes": tuple(tuple(LayerBytes(*each) for each in row) for row in fields["bytes"]),
        "kinds": {
            name: DeviceKind(
                tuple(tuple(LayerSeconds(*each) for each in row) for row in kind["seconds"]),
                tuple(kind["joined"]),
                kind["memory"],
                kind["estimated"],
            )
            for name, kind in fields["kinds"].items()
        },
        "devices": fields["devices"],
        "links": {(sender, receiver): LinkSpeed(*numbers) for sender, receiver, *numbers in fields["links"]},
        "skips": tuple(SkipBytes(source, target, tuple(size)) for source, target, size in fields["skips"]),
        "loss_inside": fields["loss_inside"],
    }


class _Lines(list[Any]):
    """A list that is written with a line for each item, so that people can read it."""


def _text(value: Any, depth: int) -> str:
    """JSON with a line for each field, and for each item of `_Lines`."""
    inner, end = "\n" + "  " * (depth + 1), "\n" + "  " * depth
    if isinstance(value, dict) and value:
        lines = [f"{json.dumps(key)}: {_text(each, depth + 1)}" for key, each in value.items()]
        return "{" + inner + f",{inner}".join(lines) + end + "}"
    if isinstance(value, list) and any(isinstance(each, _Lines) for each in value):
        return "[" + inner + f",{inner}".join(_text(each, depth + 1) for each in value) + end + "]"
    if isinstance(value, _Lines):
        return "[" + inner + f",{inner}".join(map(json.dumps, value)) + end + "]"
    return json.dumps(value)
