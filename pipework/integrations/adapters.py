"""Adapters of PEFT, whose files hold no other weights."""

from __future__ import annotations

import contextlib
import copy
from typing import TYPE_CHECKING, Any, Final

from pipework.saving.collective import run_on_all_ranks
from pipework.saving.tensor_files import Kind, open_tensors, write_by_name, write_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from pipework.backend import ProcessGroupView

_FILE: Final = "adapter_model.safetensors"


def is_adapted(model: nn.Module) -> bool:
    """Whether a model is wrapped by PEFT."""
    return hasattr(model, "get_base_model") and hasattr(model, "peft_config")


def save_adapters(group: ProcessGroupView, models: Sequence[nn.Module], state: dict[str, Tensor], folder: Path) -> None:
    """Writes the adapters of a model as PEFT does: one file for each, and its configuration.

    PEFT reads no sharded adapters: each process writes a file of its own, and the first one joins them.

    Args:
        group: the processes, all of which call it.
        models: the copies of the wrapper in the parts of this process.
        state: the parameters and buffers of this process, by their names in the model.
        folder: of all adapters; those that are not called "default" have a folder in it.
    """
    from peft import get_peft_model_state_dict  # only who has adapters has PEFT

    first: Any = models[0]
    for name, config in first.peft_config.items():
        tensors: dict[str, Tensor] = {}
        for model in models:
            with _without_stand_ins(model):
                own = get_peft_model_state_dict(model, state, name, save_embedding_layers=False)
            tensors.update({key: tensor.detach().contiguous() for key, tensor in own.items()})
        _save(group, name, config, tensors, folder if name == "default" else folder / name)


@contextlib.contextmanager
def _without_stand_ins(model: nn.Module) -> Iterator[None]:
    """Inside, a copy of the model has the modules of its part only: PEFT asks each for its names."""
    every = model.named_modules

    def here(*arguments: Any, **keywords: Any) -> Iterator[tuple[str, nn.Module]]:
        return (each for each in every(*arguments, **keywords) if not getattr(each[1], "is_elsewhere", False))

    model.__dict__["named_modules"] = here
    try:
        yield
    finally:
        del model.__dict__["named_modules"]


def _save(group: ProcessGroupView, name: str, config: Any, own: dict[str, Tensor], place: Path) -> None:
    """Writes one adapter."""
    parts = [place / f"{_FILE}.{rank}.tmp" for rank in range(len(group.everyone))]

    def write() -> dict[str, Kind]:
        place.mkdir(parents=True, exist_ok=True)
        if group.replica:
            return {}
        write_tensors(parts[group.rank], own)
        return {key: Kind.of(tensor) for key, tensor in own.items()}

    tables = run_on_all_ranks(group, f"write adapter {name!r}", write, share=lambda table: table).shared

    def join() -> None:
        if group.rank:
            return
        holders = {key: rank for rank, table in reversed([*enumerate(tables)]) for key in table}
        kinds = {key: Kind(dtype, tuple(shape)) for table in tables for key, (dtype, shape) in table.items()}
        with contextlib.ExitStack() as files:
            opened = {rank: files.enter_context(open_tensors(parts[rank])) for rank in set(holders.values())}
            write_by_name(place / _FILE, kinds, lambda key: opened[holders[key]].read(key))
        saved = copy.deepcopy(config)
        saved.inference_mode = True
        saved.save_pretrained(str(place))
        for part in parts:
            part.unlink(missing_ok=True)

    run_on_all_ranks(group, f"join adapter {name!r}", join)
