"""The tensors of a pipe that this process holds, by stage and by their names in the un-partitioned module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from pipework.model.state_names import state_name
from pipework.saving.files import UnfitError
from pipework.saving.tensor_files import Kind, check_savable
from pipework.torch_private import COMPILED_MODULE, persistent_buffers, saved_beside

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence, Set

    from torch import Tensor

    from pipework.pipe import Pipe

Stages = dict[int, dict[str, "Tensor"]]


def stages_of(pipe: Pipe, *, to_load: bool = False) -> Stages:
    """The parameters and persistent buffers of each stage that this process holds, the tensors themselves.

    With what modules put into a state dict beside these, such as the scales of quantised weights.

    Args:
        pipe: the pipe.
        to_load: accept layers on the meta device, as their values are to be read.

    Raises:
        TypeError: a tensor cannot be saved.
        ValueError: two tensors have one name.
        RuntimeError: the optimizer's steps are being made, in `step_in_backward`.

    Example:
        >>> from pipework import Pipe
        >>> pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), 4, balance=[1, 1], devices=["cpu", "cpu"])
        >>> {number: list(tensors)[:3] for number, tensors in stages_of(pipe).items()}
        {0: ['0.weight', '0.bias'], 1: ['1.weight', '1.bias', '1.running_mean']}
    """
    pipe._executor.refuse_during_steps("a checkpoint was saved or loaded")
    if local := sorted(pipe.ranks.local_names):
        raise TypeError(
            f"{listed('each process has values of its own of these parameters', local)}; a checkpoint would have those "
            "of one alone: save pipe.state_dict() on each rank with torch.save, or make them DTensors, sharded over "
            "the dimension of the mesh"
        )
    waits = to_load and all(device.type != "meta" for device in pipe.devices)
    stages: Stages = {number: {} for number in pipe.stages}
    for tensors, part in zip(stages.values(), pipe.partitions, strict=True):
        for name, tensor in _tensors(part):
            check_savable(name, tensor, waits=waits)
            own = state_name(part._modules, name)
            if tensors.setdefault(plain_name(own), tensor) is not tensor and own == name:
                raise ValueError(
                    f"{name} would be saved as {plain_name(name)}, which is the name of another tensor: "
                    f"call the module {COMPILED_MODULE!r} otherwise, which is how torch.compile names what it wraps"
                )
    return stages


def plain_name(name: str) -> str:
    """The name of a tensor in the module without wrappers of `torch.compile`.

    Example:
        >>> plain_name("2._orig_mod.0.weight")
        '2.0.weight'
    """
    return ".".join(part for part in name.split(".") if part != COMPILED_MODULE)


def aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Maps the additional names of a tensor to its first name.

    Example:
        >>> layer = nn.Linear(2, 2, bias=False)
        >>> aliases({"0.weight": layer.weight, "1.weight": layer.weight})
        {'1.weight': '0.weight'}
    """
    first: dict[int, str] = {}
    return {name: first[id(t)] for name, t in tensors.items() if first.setdefault(id(t), name) != name}


def check_fits(wanted: Mapping[str, Kind], saved: Mapping[str, Kind], everywhere: Set[str]) -> None:
    """Refuses a checkpoint of another model.

    Args:
        wanted: the tensors of this process.
        saved: the tensors of the checkpoint.
        everywhere: the names of the tensors of all processes.

    Raises:
        UnfitError: names are missing or unexpected, or a shape or dtype differs.
    """
    other = [name for name, kind in wanted.items() if name in saved and saved[name] != kind]
    wrong = [
        listed("missing in the checkpoint", [name for name in wanted if name not in saved]),
        listed("unexpected in the checkpoint", [name for name in saved if name not in everywhere]),
        listed(
            "of another shape or dtype",
            [f"{name} (it has {saved[name]}, the pipe {wanted[name]})" for name in other],
        ),
    ]
    if any(wrong):
        raise UnfitError(f"the checkpoint does not fit the pipe; {'; '.join(filter(None, wrong))}. Nothing was changed")


def listed(what: str, names: Sequence[str], most: int = 8) -> str:
    """A heading and the first names of a list; an empty text for an empty list.

    Example:
        >>> listed("missing", ["0.weight", "0.bias", "1.weight"], most=2)
        'missing: 0.weight, 0.bias and 1 more'
    """
    if not names:
        return ""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{what}: {', '.join(names[:most])}{more}"


def _tensors(partition: nn.Module) -> Iterator[tuple[str, Tensor]]:
    # Hooks may change the tensors in state_dict(), so it is not used.
    for prefix, module in partition.named_modules(remove_duplicate=False):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise TypeError(
                f"layer {prefix!r} ({type(module).__name__}) has extra state, from get_extra_state(), which a "
                "checkpoint does not hold: keep it in buffers, which may be tensors of bytes"
            )
        own = {**module._parameters, **persistent_buffers(module)}
        for name, tensor in {**saved_beside(module), **own}.items():
            if tensor is not None:
                yield f"{prefix}.{name}" if prefix else name, tensor
