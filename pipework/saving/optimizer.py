"""The state of an optimizer by names of parameters, which do not depend on how the layers are cut into stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pipework.saving.files import UnfitError, parsing
from pipework.saving.stages import listed, plain_name
from pipework.saving.tensor_files import NamedTensors, own_part
from pipework.values.dtensor import is_dtensor, with_local_part
from pipework.values.json_codec import JsonCodec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor
    from torch.optim import Optimizer

    from pipework.saving.stages import Stages


class OptimizerShard(NamedTuple):
    """The optimizer's state of one stage: what goes into a JSON file, and the tensors."""

    values: dict[str, Any]
    tensors: NamedTensors


def collect_state(optimizer: Any) -> None:
    """Collects the state of a `ZeroRedundancyOptimizer` on the first replica, which saves it; all of them call this."""
    if _is_zero(optimizer):
        optimizer.consolidate_state_dict(to=0)


def _is_zero(optimizer: Any) -> bool:
    """Whether it is a `ZeroRedundancyOptimizer`, whose import takes long."""
    return hasattr(optimizer, "consolidate_state_dict") and hasattr(optimizer, "optim")


def _class_name(optimizer: Any) -> str:
    """The class whose step it is; that of a `ZeroRedundancyOptimizer` or a `HostOptimizer` is inside."""
    return type(getattr(optimizer, "optim", optimizer)).__name__


def split_by_stage(optimizer: Optimizer | None, stages: Stages, shard: int) -> dict[int, OptimizerShard]:
    """The optimizer's state by stage. The state of a parameter that several stages share is in each of them.

    Args:
        optimizer: after `collect_state`; None: there is no state.
        stages: the tensors of this process.
        shard: the number of this process among those that hold the same layers. The first of them alone has the state
            of a `ZeroRedundancyOptimizer`.

    Raises:
        TypeError: the object is no optimizer of PyTorch's, or its state cannot be saved.
        UnfitError: the optimizer has parameters that are not the pipe's.
    """
    if optimizer is None or (shard and _is_zero(optimizer)):
        return {}
    check_optimizer(optimizer)
    # The first of the names of a tensor with several.
    names = {number: {id(t): name for name, t in reversed(tensors.items())} for number, tensors in stages.items()}
    refuse_foreign(optimizer, set().union(*names.values()))
    state = optimizer.state_dict()
    parameters = _by_index(optimizer, state)
    refuse_unowned(state, parameters)
    parts = {}
    for number, known in names.items():
        groups: list[Any] = []
        values = {"optimizer": _class_name(optimizer), "groups": groups, "state": {}}
        part = parts[number] = OptimizerShard(values, NamedTensors())
        codec = JsonCodec(put=part.tensors.put)
        for index, group in enumerate(state["param_groups"]):
            members = [known[id(parameters[i])] for i in group["params"] if id(parameters[i]) in known]
            groups.append({"parameters": members, "options": codec.encode(options_of(group), f"group {index}")})
        own = {known[id(parameters[i])]: each for i, each in state["state"].items() if id(parameters[i]) in known}
        values["state"] = {name: codec.encode(remembered, name) for name, remembered in own.items()}
    return parts


@dataclass(frozen=True)
class Restored:
    """A state in memory that fits the optimizer and was not applied yet."""

    optimizer: Optimizer
    state: dict[str, Any]

    def apply(self) -> Callable[[], None]:
        """Gives the optimizer its state.

        Returns:
            A function that undoes this.
        """
        optimizer = self.optimizer
        before = optimizer.state, optimizer.param_groups

        def undo() -> None:
            optimizer.state, optimizer.param_groups = before

        try:
            optimizer.load_state_dict(self.state)
            self._put_dtypes_back()
        except BaseException:
            undo()
            raise
        return undo

    def _put_dtypes_back(self) -> None:
        """Restores dtypes: `load_state_dict` casts state tensors to their parameter's dtype."""
        parameters = _by_index(self.optimizer, self.state)
        with_state: Any = self.optimizer
        if _is_zero(with_state):
            with_state = with_state.optim
        for index, remembered in self.state["state"].items():
            if remembered is None:  # another replica has the state
                continue
            now = with_state.state[parameters[index]]
            for key, value in remembered.items():
                if isinstance(value, torch.Tensor) and isinstance(now.get(key), torch.Tensor):
                    now[key] = now[key] if now[key].dtype == value.dtype else value.to(now[key].device)


def restore(
    optimizer: Optimizer, stages: Stages, parts: Iterable[tuple[str, Any, Callable[[str], Tensor]]]
) -> Restored:
    """Assembles the state for an optimizer, which stays unchanged until the state is applied.

    Args:
        optimizer: gets the state.
        stages: the pipe's tensors.
        parts: for each saved stage the name of its JSON file, the content, and a function that reads a tensor.

    Raises:
        DamagedError: the content of a file is malformed.
        UnfitError: the state does not fit the optimizer.
    """
    names: dict[int, list[str]] = {}
    for tensors in stages.values():
        for name, tensor in tensors.items():
            names.setdefault(id(tensor), []).append(name)
    refuse_foreign(optimizer, names)
    kind, saved = _class_name(optimizer), _Saved(parts)
    if saved.kinds - {kind}:
        raise UnfitError(
            f"the checkpoint has the state of {' and '.join(sorted(saved.kinds))}, and the optimizer is "
            f"{kind}: make the same, or load without an optimizer. Nothing was changed"
        )
    # A parameter of several stages has several names; take one that the checkpoint has.
    key = {which: next((name for name in each if name in saved.group), each[0]) for which, each in names.items()}
    present = torch.optim.Optimizer.state_dict(optimizer) if _is_zero(optimizer) else optimizer.state_dict()
    parameters = _by_index(optimizer, present)
    here = [key[id(parameter)] for parameter in parameters.values()]
    more = [name for name in key.values() if name in saved.group and name not in here]
    wrong = [
        listed("parameters without any in the checkpoint", [name for name in here if name not in saved.group]),
        listed("parameters that only the checkpoint's optimizer has", more),
    ]
    if any(wrong):
        raise UnfitError(
            f"the checkpoint does not fit the optimizer; {'; '.join(filter(None, wrong))}. Nothing was changed"
        )
    groups, state = [], {}
    for number, group in enumerate(present["param_groups"]):
        members = [key[id(parameters[index])] for index in group["params"]]
        groups.append({**group, **saved.options(number, members)})
        for index, name in zip(group["params"], members, strict=True):
            if name in saved.state:
                remembered = saved.state[name].decoded()
                state[index] = {each: _laid_out(value, parameters[index]) for each, value in remembered.items()}
    return Restored(optimizer, {**present, "state": state, "param_groups": groups})


class _Part(NamedTuple):
    """An encoded part of a file, which is decoded when it is needed: it may name tensors, which are read then."""

    file: str
    form: Any
    codec: JsonCodec

    def decoded(self) -> dict[str, Any]:
        """The part as it was saved."""
        with parsing(self.file):
            return dict(self.codec.decode(self.form))


class _Saved:
    """The state of all stages: classes of the optimizer, options by group, and group and state by parameter."""

    def __init__(self, parts: Iterable[tuple[str, Any, Callable[[str], Tensor]]]) -> None:
        self.kinds: set[str] = set()
        self.groups: dict[int, list[_Part]] = {}
        self.group: dict[str, int] = {}
        self.state: dict[str, _Part] = {}
        for file, value, read in parts:
            codec = JsonCodec(get=read)
            with parsing(file):
                self.kinds.add(str(value["optimizer"]))
                for number, each in enumerate(value["groups"]):
                    self.groups.setdefault(number, []).append(_Part(file, each["options"], codec))
                    for name in each["parameters"]:
                        self.group.setdefault(plain_name(name), number)
                for name, remembered in value["state"].items():
                    self.state.setdefault(plain_name(name), _Part(file, remembered, codec))

    def options(self, number: int, members: list[str]) -> dict[str, Any]:
        """The options of a group of these parameters, such as its learning rate."""
        numbers = sorted({self.group[name] for name in members}) or [number]
        found = [self.groups[each][0] for each in numbers if each in self.groups]
        if any(part.form != found[0].form for part in found):
            raise UnfitError(
                f"group {number} of the optimizer has parameters of the groups {numbers} of the checkpoint, whose "
                "options differ: make the groups as they were. Nothing was changed"
            )
        return found[0].decoded() if found else {}


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What is set for a group of parameters, such as its learning rate."""
    # `param_names` describes the parameters that are there. It is no setting.
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def check_optimizer(optimizer: Any) -> None:
    """Refuses an object that is no optimizer of PyTorch's.

    Raises:
        TypeError: the object is of another class.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"wanted a torch.optim.Optimizer, got a {type(optimizer).__name__}")


def _by_index(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[int, Tensor]:
    """The parameters by their numbers in a state dict."""
    return {
        index: parameter
        for packed, group in zip(state["param_groups"], optimizer.param_groups, strict=True)
        for index, parameter in zip(packed["params"], group["params"], strict=True)
    }


def refuse_foreign(optimizer: Optimizer, known: Iterable[int]) -> None:
    """Raises an UnfitError if parameters of an optimizer are none of these, by their ids."""
    here = set(known)
    foreign = [
        f"{tuple(parameter.shape)} in group {number}"
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if id(parameter) not in here
    ]
    if foreign:
        raise UnfitError(
            f"the optimizer has parameters that are not the pipe's; {listed('their shapes', foreign)}. Make it of "
            "pipe.parameters() alone, and give other parameters an optimizer of their own"
        )


def refuse_unowned(state: Mapping[str, Any], parameters: Mapping[int, Any]) -> None:
    """Raises a TypeError if a state dict has state of what is no parameter."""
    unowned = [key for key in state["state"] if key not in parameters]
    if unowned:
        raise TypeError(
            f"the optimizer has state that belongs to no parameter, under {unowned[0]!r}: it cannot be divided among "
            "stages"
        )


def _laid_out(value: Any, parameter: Tensor) -> Any:
    """Gives a tensor with the shape of its parameter the parameter's memory layout, which the optimizer gave it.

    Of a parameter that is a DTensor, it becomes one, too.
    """
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    if is_dtensor(parameter):
        part = own_part(value, parameter)  # of a layer without data yet, it stays where it is until that is filled
        return with_local_part(part if parameter.is_meta else part.to(parameter.device), parameter)
    if parameter.is_contiguous():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device="cpu", requires_grad=False).copy_(value)
