"""Folders that transformers and PEFT read and write, from pipes: each process reads and writes its own tensors only."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from pipework.integrations import pretrained_in
from pipework.integrations.adapters import AdapterFile, adapter_files, is_adapted, save_adapters
from pipework.saving.collective import process_group_of, run_on_all_ranks
from pipework.saving.files import replace_file
from pipework.saving.tensor_files import check_savable, write_tensors

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from torch import Tensor, nn
    from transformers.modeling_utils import PreTrainedModel

    import pipework
    from pipework.integrations.sketch import Sketch
    from pipework.pipe import Pipe

_ONE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_LARGEST: Final = 5 * 10**9  # bytes of a file
# What PEFT puts into names: around a layer, the copies that are trained in its place, and trained rows of an embedding.
_WRAPPERS: Final = re.compile(r"\.(base_layer|original_module|token_adapter|modules_to_save\.[^.]+)(?=\.)")


class LoadedTensors(NamedTuple):
    """What a process has read.

    Attributes:
        tensors: their number.
        bytes: their size in the files.
        missing: the names of tensors of this process that the files lack; they keep their values.
    """

    tensors: int
    bytes: int
    missing: tuple[str, ...]


def load_pretrained(pipe: pipework.Pipe, folder: str | os.PathLike[str]) -> LoadedTensors:
    """Fills a pipe of a model of transformers from a local folder of safetensors files.

    Each process reads the tensors of its own units only, under whatever names transformers knows for them. The model
    may lie on the meta device. With adapters of PEFT, those are read that the folder has: the adapters, and the weights
    below them.

    Args:
        pipe: of a model that was attached, or of its parts.
        folder: what `model.save_pretrained(folder)` or `save_pretrained(pipe, folder)` wrote.

    Raises:
        TypeError: the pipe is not one of a model of transformers.
        FileNotFoundError: the folder has no safetensors files.
        ValueError: none of the files' tensors belongs to the model, or an adapter's file is of another one.

    Example:
        >>> import tempfile, torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from pipework import attach, load_pretrained, save_pretrained
        >>> config = LlamaConfig(
        ...     vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2
        ... )
        >>> with torch.device("meta"):
        ...     model = LlamaForCausalLM(config)
        >>> ids = torch.arange(8).reshape(2, 4)
        >>> pipe = attach(model, {"input_ids": ids, "labels": ids}, chunks=2, devices=["cpu", "cpu"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     LlamaForCausalLM(config).save_pretrained(folder)
        ...     load_pretrained(pipe, folder).tensors
        21
    """
    group, place = process_group_of(pipe), Path(folder)
    whole, _ = _model_of(pipe)
    files = adapter_files(group, whole, pipe.state_dict(), place) if is_adapted(whole) else []
    return run_on_all_ranks(group, f"load {folder}", lambda: _load(pipe, place, files)).own


def save_pretrained(
    pipe: pipework.Pipe,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int = _LARGEST,
    save_embedding_layers: bool | Literal["auto"] = "auto",
) -> None:
    """Writes a pipe of a model of transformers so that `from_pretrained(folder)` reads it.

    All processes call it, and each writes the tensors of its own units: safetensors files, their index and the
    configuration. Of a model with adapters of PEFT, PEFT itself writes the adapters, and nothing else, in the first
    process.

    Args:
        pipe: of a model that was attached, or of its parts.
        folder: on a file system that all processes share. Files of a model that it had are replaced.
        max_shard_size: the largest file, in bytes.
        save_embedding_layers: of PEFT: whether embeddings are written with the adapters.

    Raises:
        TypeError: the pipe is not one of a model of transformers, or a tensor cannot be saved.

    Example:
        >>> import tempfile, torch
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> from pipework import attach, save_pretrained
        >>> config = BertConfig(
        ...     vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2
        ... )
        >>> model, ids = BertForMaskedLM(config), torch.arange(8).reshape(2, 4)
        >>> pipe = attach(model, {"input_ids": ids, "labels": ids}, chunks=2, devices=["cpu", "cpu"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_pretrained(pipe, folder)
        ...     again = BertForMaskedLM.from_pretrained(folder)
        >>> torch.equal(again.cls.predictions.bias, model.cls.predictions.bias)
        True
    """
    group, place = process_group_of(pipe), Path(folder)
    run_on_all_ranks(group, f"make {folder}", lambda: place.mkdir(parents=True, exist_ok=True))
    whole, core = _model_of(pipe)
    if is_adapted(whole):
        save_adapters(group, whole, pipe.state_dict(), place, save_embedding_layers)
        return
    sketch = _sketch_of(core)
    offered = run_on_all_ranks(group, "list its tensors", lambda: _own(pipe.state_dict(), sketch), share=list)
    writers = {name: rank for rank, names in reversed([*enumerate(offered.shared)]) for name in names}
    own = {name: tensor for name, tensor in offered.own.items() if writers[name] == group.rank}
    ready = run_on_all_ranks(group, "name tensors", lambda: _shards(sketch.as_saved(own), max_shard_size), share=len)
    first, count = sum(ready.shared[: group.rank]) + 1, sum(ready.shared)

    def write() -> dict[str, tuple[str, int]]:
        table = {}
        for number, shard in enumerate(ready.own, first):
            file = _ONE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            write_tensors(place / file, shard)
            table.update({name: (file, tensor.nbytes) for name, tensor in shard.items()})
        return table

    run_on_all_ranks(group, "clear the folder", lambda: _clear(place) if group.rank == 0 else None)
    # By the name of a tensor: its file, and its bytes.
    written = run_on_all_ranks(group, "write its tensors", write, share=lambda table: table).shared
    table = {name: each for part in written for name, each in part.items()}

    def complete() -> None:
        if group.rank != 0:
            return
        model = sketch.model
        model.config.dtype = str(next(core.parameters()).dtype).removeprefix("torch.")
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(place)
        if model.can_generate():
            core.generation_config.save_pretrained(place)
        if count > 1:
            files = {name: table[name][0] for name in sorted(table)}
            index = {"metadata": {"total_size": sum(size for _, size in table.values())}, "weight_map": files}
            replace_file(place / _INDEX, json.dumps(index, indent=2).encode())

    run_on_all_ranks(group, "write the configuration", complete)


def _model_of(pipe: Pipe) -> tuple[nn.Module, PreTrainedModel]:
    """The copy of the model in the first part of this process, and what of it is transformers' own."""
    for part in pipe:
        whole: Any = getattr(part, "model", None)
        core = None if whole is None else pretrained_in(whole)
        if core is not None:
            return whole, core
    raise TypeError(
        "the pipe is not one of a model of transformers: wanted what pipework.attach(model, ...) returned, or a Pipe "
        "of pipework.to_sequential(model, ...); pipework.save_checkpoint saves any pipe"
    )


def _sketch_of(core: PreTrainedModel) -> Sketch:
    from pipework.integrations.sketch import Sketch  # imports transformers, which takes seconds

    return Sketch(core)


def _plain_names(pipe: Pipe) -> dict[str, str]:
    """From the names of the pipe's tensors to those in the model without the wrappers of PEFT."""
    whole, core = _model_of(pipe)
    if whole is core:
        return {name: name for name in pipe.state_dict()}
    prefix = next(f"{name}." for name, module in whole.named_modules() if module is core)
    return {name: _WRAPPERS.sub("", name.removeprefix(prefix)) for name in pipe.state_dict()}


def _load(pipe: Pipe, folder: Path, adapters: list[AdapterFile]) -> LoadedTensors:
    there = [each for each in adapters if each.path.is_file()]
    state = pipe.state_dict()
    found = {name: tensor for each in there for name, tensor in each.read(state).items()}
    read = [tensor for tensor in found.values() if tensor is not None]
    count, size = len(read), sum(tensor.nbytes for tensor in read)
    if not there or (folder / _ONE).is_file() or (folder / _INDEX).is_file():
        # The model's own tensors, which lie below the adapters.
        sketch = _sketch_of(_model_of(pipe)[1])
        names = {own: plain for own, plain in _plain_names(pipe).items() if plain in sketch.model.state_dict()}
        wanted = {alias for plain in names.values() for alias in sketch.aliases.get(plain, [plain])}
        below, more, bytes_more = sketch.filled(_files_in(folder), wanted)
        if names and below.keys().isdisjoint(names.values()):
            raise ValueError(
                f"{folder} has none of the {len(names)} tensors of {type(sketch.model).__name__} in this process, such "
                f"as {next(iter(names))}: give the folder of the same model"
            )
        found = {**{own: below.get(plain) for own, plain in names.items()}, **found}
        count, size = count + more, size + bytes_more
    pipe.load_state_dict({name: tensor for name, tensor in found.items() if tensor is not None}, strict=False)
    missing = tuple(name for name, tensor in found.items() if tensor is None)
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        text = "%s has no %s: they keep the values that they had"
        logging.getLogger("pipework").warning(text, folder, shown)
    return LoadedTensors(count, size, missing)


def _files_in(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if (folder / _ONE).is_file():
        return [folder / _ONE]
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    raise FileNotFoundError(f"{folder} has neither {_ONE} nor {_INDEX}: give a local folder of safetensors files")


def _own(state: dict[str, Tensor], sketch: Sketch) -> dict[str, Tensor]:
    """The tensors of this process that are to be saved, those that are tied once."""
    for name, tensor in state.items():
        check_savable(name, tensor)
    return {name: tensor for name, tensor in state.items() if sketch.first_name(name) == name}


def _shards(state: Mapping[str, Tensor], largest: int) -> list[dict[str, Tensor]]:
    """Tensors in files that are not too large."""
    shards: list[dict[str, Tensor]] = []
    for name, tensor in state.items():
        if not shards or sum(each.nbytes for each in shards[-1].values()) + tensor.nbytes > largest:
            shards.append({})
        shards[-1][name] = tensor
    return shards


def _clear(place: Path) -> None:
    """Removes a model's files before new ones are written, so that no folder has files of two models."""
    for old in (place / _ONE, place / _INDEX, *place.glob("model-*-of-*.safetensors")):
        old.unlink(missing_ok=True)
