"""Adapters of PEFT, whose files hold no other weights. PEFT itself names and writes them."""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import torch

from pipework.saving.collective import run_on_all_ranks, write_in_parts
from pipework.saving.tensor_files import Kind, open_tensors, write_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor, nn

    from pipework.backend import ProcessGroupView

_FILE: Final = "adapter_model.safetensors"


class AdapterFile(NamedTuple):
    """The file of one adapter.

    Attributes:
        path: of the file, which may not be there.
        names: maps the names of the adapter's tensors in the file to their names in the model.
        embeddings: likewise for the embeddings below the adapter. A file has all of them or none.
    """

    path: Path
    names: dict[str, str]
    embeddings: dict[str, str]

    def read(self, wanted: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        """The tensors that this process wants of the file, by their names in the model; None: the file lacks it.

        Raises:
            ValueError: the file is of another adapter.
        """
        with open_tensors(self.path) as opened:
            if unknown := sorted(opened.names - self.names.keys() - self.embeddings.keys()):
                raise ValueError(
                    f"{self.path} has {unknown[0]}, for which the adapter here has no tensor: make it with the "
                    "configuration that the saved one had, or load it with PEFT before the pipe is attached"
                )
            there = {key: name for key, name in self.embeddings.items() if key in opened.names}
            own = {key: name for key, name in {**there, **self.names}.items() if name in wanted}
            return {name: opened.read(key) if key in opened.names else None for key, name in own.items()}


def is_adapted(model: nn.Module) -> bool:
    """Whether a model is wrapped by PEFT."""
    return hasattr(model, "get_base_model") and hasattr(model, "peft_config")


def save_adapters(
    group: ProcessGroupView, model: Any, state: dict[str, Tensor], folder: Path, embeddings: bool | Literal["auto"]
) -> None:
    """Lets PEFT write the adapters of a model in the first process. The other processes hand it their tensors.

    Args:
        group: the processes, all of which call it.
        model: the copy of the wrapper in one of the parts of this process.
        state: the parameters and buffers of this process, by their names in the model.
        folder: of all adapters; those that are not called "default" have a folder in it.
        embeddings: PEFT's `save_embedding_layers`.
    """
    whole = _without_values(group, state)

    def chosen() -> set[str]:
        by_file = [_names_in_file(model, whole, adapter, embeddings) for adapter in model.peft_config]
        return {name for each in by_file for name in each.values()}

    names = run_on_all_ranks(group, "name its adapters", chosen).own

    def join(parts: list[Path]) -> None:
        found = {**whole, **state}
        for part in parts:
            with open_tensors(part) as opened:
                found.update({name: opened.read(name) for name in opened.names})
        with _seen_whole(model):
            model.save_pretrained(str(folder), state_dict=found, save_embedding_layers=embeddings)

    own = {name: tensor for name, tensor in state.items() if name in names}
    write_in_parts(group, "its adapters", folder / _FILE, lambda part: write_tensors(part, own), join)


def adapter_files(group: ProcessGroupView, model: Any, state: dict[str, Tensor], folder: Path) -> list[AdapterFile]:
    """The file of each adapter; see `save_adapters`."""
    whole, files = _without_values(group, state), []
    for name in model.peft_config:
        path = (folder if name == "default" else folder / name) / _FILE
        files.append(AdapterFile(path, *(_names_in_file(model, whole, name, each) for each in (False, True))))
    return files


def _without_values(group: ProcessGroupView, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of all processes by name, on the meta device."""
    kinds = {name: Kind.of(tensor) for name, tensor in state.items()}
    tables = run_on_all_ranks(group, "list its tensors", lambda: kinds, share=lambda each: each).shared
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for table in tables
        for name, (dtype, shape) in table.items()
    }


def _names_in_file(
    model: Any, whole: dict[str, Tensor], adapter: str, embeddings: bool | Literal["auto"]
) -> dict[str, str]:
    """Maps the names that an adapter's tensors have in its file to their names in the model."""
    from peft import get_peft_model_state_dict  # PEFT is there if a model has adapters

    names = {id(tensor): name for name, tensor in whole.items()}
    with _seen_whole(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns again when it writes the file
        saved = get_peft_model_state_dict(model, whole, adapter, save_embedding_layers=embeddings)
    return {key: names[id(tensor)] for key, tensor in saved.items() if id(tensor) in names}


@contextlib.contextmanager
def _seen_whole(model: nn.Module) -> Iterator[None]:
    """A context in which a part's copy of the model also lists the modules of other parts: PEFT asks for all names."""
    stand_ins = [module for module in model.modules() if getattr(module, "is_elsewhere", False)]
    for each in stand_ins:
        each.__dict__["named_modules"] = functools.partial(_named_modules, each)
    try:
        yield
    finally:
        for each in stand_ins:
            del each.__dict__["named_modules"]


def _named_modules(
    stand_in: nn.Module, memo: Any = None, prefix: str = "", remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    yield prefix, stand_in  # which may be what the model calls its embedding
    yield from vars(stand_in)["_elsewhere"].named_modules(memo, prefix, remove_duplicate)
