"""What other libraries' models and trainers need beyond PyTorch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from pipework.model.parts.adapter import Adapter

if TYPE_CHECKING:
    from torch import nn
    from transformers.modeling_utils import PreTrainedModel


def pretrained_in(model: nn.Module) -> PreTrainedModel | None:
    """The model of transformers that this is, or that a wrapper of PEFT is around; None: there is none.

    A library that is not imported has made no model.
    """
    library: Any = sys.modules.get("transformers.modeling_utils")
    unwrap: Any = getattr(model, "get_base_model", None)
    core = model if unwrap is None else unwrap()
    return core if library is not None and isinstance(core, library.PreTrainedModel) else None


def adapter_for(model: nn.Module) -> Adapter:
    """The adapter for a model."""
    core = pretrained_in(model)
    if core is None:
        return Adapter()
    from pipework.integrations.transformers import TransformersAdapter  # imports transformers, which takes seconds

    return TransformersAdapter(core)
