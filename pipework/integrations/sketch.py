"""The names that a model's tensors have in its files, and their conversion, as transformers knows them."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import LoadStateDictConfig

from pipework.model.parts.skeleton import Container, Unit

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor
    from transformers.modeling_utils import PreTrainedModel


class Sketch:
    """A model of transformers without values. It gives the names of tensors in files.

    Attributes:
        model: on the meta device.
        aliases: for each name of a parameter, all names of the same parameter, in order.
    """

    def __init__(self, core: PreTrainedModel) -> None:
        kind: Any = next(each for each in type(core).__mro__ if not issubclass(each, (Container, Unit)))
        with torch.device("meta"):
            self.model: Any = kind(copy.deepcopy(core.config))
        same: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            same.setdefault(id(parameter), []).append(name)
        self.aliases = {name: names for names in same.values() for name in names}

    def first_name(self, name: str) -> str:
        """The name under which a tensor is saved."""
        return self.aliases.get(name, [name])[0]

    def as_saved(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """A part of the state dict as in files."""
        ignored = self.model._keys_to_ignore_on_save or ()
        kept = {name: tensor.detach() for name, tensor in state.items() if name not in ignored}
        return {name: each.contiguous() for name, each in revert_weight_conversion(self.model, kept).items()}

    def filled(self, files: Iterable[Path], wanted: set[str]) -> tuple[dict[str, Tensor], int, int]:
        """The wanted tensors by name, and how many tensors and bytes of the files they were."""
        conversion: Any = get_model_conversion_mapping(self.model)
        renamings = [each for each in conversion if isinstance(each, WeightRenaming)]
        converters = [each for each in conversion if isinstance(each, WeightConverter)]
        shapes = self.model.state_dict()
        sources: dict[str, Any] = {}
        size = 0
        for file in files:
            opened: Any = safe_open(file, framework="pt")
            for key in opened.keys():  # noqa: SIM118  it is no mapping
                target, _ = rename_source_key(key, renamings, converters, self.model.base_model_prefix, shapes)
                if target in wanted:
                    sources[key] = opened.get_slice(key)
                    size += _bytes_of(sources[key])
        config = LoadStateDictConfig(weight_mapping=conversion, device_map={"": "cpu"}, dtype=None)
        convert_and_load_state_dict_in_model(self.model, sources, config, None)
        named = (
            *self.model.named_parameters(remove_duplicate=False),
            *self.model.named_buffers(remove_duplicate=False),
        )
        found = {name: tensor for name, tensor in named if not tensor.is_meta}
        for name in list(found):
            found.update(dict.fromkeys(self.aliases.get(name, ()), found[name]))
        return found, len(sources), size


def _bytes_of(view: Any) -> int:
    empty: Tensor = view[(slice(0, 0),) * min(1, len(view.get_shape()))]
    return empty.element_size() * torch.Size(view.get_shape()).numel()
