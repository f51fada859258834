"""The state of an optimizer in one file of PyTorch's, as a process with the whole model writes and reads it.

PyTorch knows parameters by their positions, group by group. On several ranks each has an optimizer of its own ones:

    whole model    a  b  c  d        group 0: a c d      group 1: b
    rank 0         a  b              group 0: a          group 1: b
    rank 1               c  d        group 0: c d        group 1:

So the names of a group on all ranks, in the order of the model, are those of the whole optimizer.
"""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING, Any

import torch

from pipework.saving.collective import run_on_all_ranks, write_in_parts
from pipework.saving.files import UnfitError
from pipework.saving.optimizer import Restored, collect_state, options_of, refuse_foreign, refuse_unowned

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn
    from torch.optim import Optimizer

    from pipework.backend import ProcessGroupView

Names = list[list[str]]  # of the parameters in each group


def names_by_group(group: ProcessGroupView, model: nn.Module, optimizer: Optimizer) -> Names:
    """The names of the parameters in each group of an optimizer of the whole model.

    Args:
        group: the ranks, all of which call it.
        model: to which a pipe is attached.
        optimizer: of this rank's parameters.

    Raises:
        ValueError: the ranks have different numbers of groups, or a group is not in the order of the model.

    Example:
        >>> from pipework.backend import ProcessGroupView
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD([{"params": [model.bias]}, {"params": [model.weight]}])
        >>> names_by_group(ProcessGroupView(), model, optimizer)
        [['bias'], ['weight']]
    """
    action = "name the parameters of its optimizer"
    own, every = run_on_all_ranks(group, action, lambda: _own_names(model, optimizer), share=list)
    if len(every) == 1:
        return own
    if len({len(each) for each in every}) > 1:
        raise UnfitError(
            f"the optimizers of the ranks have {[len(each) for each in every]} groups of parameters: make the same "
            "groups on all ranks, those that are empty there, too"
        )
    position = {name: number for number, name in enumerate(_by_id(model).values())}
    whole = []
    for number, parts in enumerate(zip(*every, strict=True)):
        for names in parts:
            if names != sorted(names, key=position.__getitem__):
                raise UnfitError(
                    f"group {number} of the optimizer begins with {', '.join(names[:3])}: its state is saved in the "
                    "order of model.parameters(), so give them in that order"
                )
        whole.append(sorted({*itertools.chain(*parts)}, key=position.__getitem__))
    return whole


def save_whole_optimizer(group: ProcessGroupView, model: nn.Module, optimizer: Optimizer, path: Path) -> None:
    """Writes the state of all ranks' optimizers as one state dict; see `names_by_group`."""
    if len(group.everyone) == 1:
        torch.save(optimizer.state_dict(), path)
        return
    whole = names_by_group(group, model, optimizer)
    run_on_all_ranks(group, "collect the state of the optimizer", lambda: collect_state(optimizer))

    def write(part: Path) -> None:
        state = optimizer.state_dict()
        names = _by_index(state, _own_names(model, optimizer))
        refuse_unowned(state, names)
        torch.save({names[index]: each for index, each in state["state"].items()}, part)

    def join(parts: list[Path]) -> None:
        found: dict[str, Any] = {}
        for part in parts:  # tensors stay in their files until they are written
            found.update(torch.load(part, map_location="cpu", mmap=True, weights_only=True))
        torch.save(_numbered(found, [options_of(each) for each in optimizer.param_groups], whole), path)

    write_in_parts(group, "the state of its optimizer", path, write, join)


def _numbered(state: dict[str, Any], options: list[dict[str, Any]], names: Names) -> dict[str, Any]:
    """A state dict of PyTorch's for parameters with these names, from the state by name and the options by group."""
    numbers = {name: number for number, name in enumerate(itertools.chain(*names))}
    groups = [{**each, "params": [numbers[name] for name in own]} for each, own in zip(options, names, strict=True)]
    return {"state": {numbers[name]: state[name] for name in numbers if name in state}, "param_groups": groups}


def load_whole_optimizer(group: ProcessGroupView, model: nn.Module, optimizer: Optimizer, path: Path) -> None:
    """Gives each rank's optimizer its part of a state dict of the whole one; see `names_by_group`.

    Raises:
        ValueError: the state is of other parameters.
    """
    whole = names_by_group(group, model, optimizer)

    def load() -> None:
        saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        sizes, expected = [len(each["params"]) for each in saved["param_groups"]], [len(names) for names in whole]
        if sizes != expected:
            raise UnfitError(
                f"{path} is of an optimizer whose groups have {sizes} parameters, and those of the one here have "
                f"{expected}: train the same parameters in the same groups. Nothing was changed"
            )
        own = _own_names(model, optimizer)
        here = {*itertools.chain(*own)}
        named = {name: saved["state"].get(index) for index, name in _by_index(saved, whole).items() if name in here}
        # Copied into memory: the file may be removed.
        found = {name: copy.deepcopy(each) for name, each in named.items() if each is not None}
        Restored(optimizer, _numbered(found, saved["param_groups"], own)).apply()

    run_on_all_ranks(group, "load the state of its optimizer", load)


def _by_id(model: nn.Module) -> dict[int, str]:
    """The first name of each parameter, those of other ranks among them, in the order of the model."""
    return {id(parameter): name for name, parameter in type(model).named_parameters(model)}


def _own_names(model: nn.Module, optimizer: Optimizer) -> Names:
    """The names of the parameters in each group of this rank's optimizer."""
    names = _by_id(model)
    refuse_foreign(optimizer, names)
    return [[names[id(parameter)] for parameter in each["params"]] for each in optimizer.param_groups]


def _by_index(state: dict[str, Any], names: Names) -> dict[int, str]:
    """The names of parameters by their numbers in a state dict."""
    numbers = (index for each in state["param_groups"] for index in each["params"])
    return dict(zip(numbers, itertools.chain(*names), strict=True))
