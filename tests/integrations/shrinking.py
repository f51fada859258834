"""Tiny configurations of any model of transformers, made from the defaults of its configuration's class."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

from transformers import PreTrainedConfig

VOCABULARY = 99
LABELS = 3

# Fields by name; the others follow from patterns.
FIELDS = {
    "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, "src_vocab_size": VOCABULARY,
    "tgt_vocab_size": VOCABULARY, "entity_vocab_size": 20, "type_vocab_size": 2,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "decoder_start_token_id": 0, "forced_eos_token_id": 1,
    "mask_token_id": 3, "cls_token_id": 0, "sep_token_id": 1, "unk_token_id": 3, "num_labels": LABELS,
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "dim": 64, "emb_dim": 64, "embedding_size": 64, "embed_dim": 64,
    "word_embed_proj_dim": 64, "hidden_size_per_layer_input": 16, "classifier_proj_size": 32, "d_embed": 64,
    "intermediate_size": 128, "ffn_dim": 128, "d_ff": 128, "d_inner": 128, "n_inner": 128, "hidden_dim": 128,
    "dim_ff": 128, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "ffn_hidden_size": 128, "ff_dim": 128,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "dense_intermediate_size": 64,
    "expert_ffn_hidden_size": 32, "block_ff_dim": 128, "intermediate_size_mlp": 128, "attn_mlp_dim": 64,
    "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 4, "encoder_layers": 2, "decoder_layers": 2,
    "num_decoder_layers": 2, "num_encoder_layers": 2, "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "num_key_value_heads": 2, "num_kv_heads": 2, "num_global_key_value_heads": 2,
    "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4, "encoder_num_key_value_heads": 4,
    "decoder_num_key_value_heads": 4,
    "head_dim": 16, "d_kv": 16, "d_head": 16, "attention_head_size": 16, "rotary_dim": 8, "global_head_dim": 16,
    "swa_head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_v_head_dim": 16,
    "max_position_embeddings": 64, "n_positions": 64, "max_sequence_length": 64, "seq_length": 64, "max_seq_len": 64,
    "n_ctx": 64, "max_source_positions": 64, "max_target_positions": 64, "original_max_position_embeddings": 64,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2,
    "moe_num_experts": 4, "moe_k": 2, "top_k_experts": 2, "num_experts_per_token": 2, "moe_top_k": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "zero_expert_num": 2, "expert_dim": 32,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "index_head_dim": 16, "index_n_heads": 4, "index_topk": 8, "o_lora_rank": 16, "o_groups": 2,
    "sliding_window": 4, "state_size": 8, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 8,
    "mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 8, "time_step_rank": 4, "lru_width": 64,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "image_size": 32, "patch_size": 8, "num_mel_bins": 16, "num_conv_pos_embedding_groups": 4,
    "num_conv_pos_embeddings": 16, "max_length": 32, "n_mels": 16, "n_mel_channels": 16,
    "subsampling_conv_channels": 16, "conv_channels": 16, "mamba_d_ssm": 128,
    "n_shared_experts": 1, "clip_qkv": 8.0,
}  # fmt: skip
MISSING = {**FIELDS, "rope_theta": 10000.0}  # what a configuration may lack that its model reads
PATTERNS = (
    (
        re.compile(
            r"(hidden|embed|embedding|intermediate|ffn|ff|mlp|proj|inner|model|channels?)(ding)?s?_?(size|dim|width)s?$"
        ),
        64,
    ),
    (re.compile(r"(num|n)_(?!feat_extract).*layers$|depth$"), 2),
    (re.compile(r"heads$"), 4),
    (re.compile(r"max_.*(positions?|position_embeddings|len|length)$"), 64),
    (re.compile(r"vocab(_size)?$"), VOCABULARY),
)
# Widths, which may all be divided by the same number.
WIDTHS = re.compile(r"size|dim|width|channels|rank|embd|embed|hidden|inner|ffn|d_model|d_kv|d_ff|d_ssm|filters")
NO_WIDTHS = re.compile(
    r"vocab|image|patch|kernel|window|position|batch|chunk|block|group|grid|pool|tile|stride|token|context|bucket|"
    r"layers|heads|num_|vision_feature|codebook|codevector"
)
FACTORS = (16, 8, 32)
# What no rule finds, by the class of a configuration.
BY_HAND: dict[str, dict[str, Any]] = {
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"] * 2},
    "GraniteMoeHybridConfig": {"layer_types": ["mamba", "attention"] * 2},
}
# What is tried in turn, until a model can be made and trained; None leaves a field out.
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"head_dim": None},
    {"num_key_value_heads": 4},
    {"layer_types": None},
    {"num_key_value_heads": 4, "head_dim": None, "layer_types": None},
    {"patch_size": None},
    {"patch_size": None, "image_size": None},
    {"hidden_size": None, "embed_dim": None, "num_attention_heads": None, "num_heads": None, "head_dim": None},
    {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "num_key_value_heads": 2},
)


def tiny_configs(kind: type[PreTrainedConfig]) -> Iterator[PreTrainedConfig]:
    """Configurations of a class with small sizes; not all of them fit together.

    Raises:
        Exception: of any kind; the defaults of the class do not fit together.
    """
    tried: list[dict[str, Any]] = []
    for changed in _proposals(kind):
        if changed in tried:
            continue
        tried.append(changed)
        try:
            yield kind(**copy.deepcopy(changed))
        except Exception:
            continue


def completed(config: PreTrainedConfig, error: BaseException) -> bool:
    """Sets what an error says a configuration, or one inside of it, lacks; whether there was such a thing."""
    found = re.match(r"'(\w+)' object has no attribute '(\w+)'", str(error))
    if found is None or found[2] not in MISSING:
        return False
    configs = [config, *(value for value in vars(config).values() if isinstance(value, PreTrainedConfig))]
    lacking = [each for each in configs if type(each).__name__ == found[1] and not hasattr(each, found[2])]
    for each in lacking:
        setattr(each, found[2], MISSING[found[2]])
    return bool(lacking)


def _proposals(kind: type[PreTrainedConfig]) -> Iterator[dict[str, Any]]:
    """Fields of a configuration: with some left out, or filled in, or all widths divided, or one field as it was."""
    fields = _fields(kind, _small) | BY_HAND.get(kind.__name__, {})
    for change in CHANGES:
        yield _changed(fields, change)
    yield {**_fields(kind, _filled)}
    for factor in FACTORS:
        yield _fields(kind, functools.partial(_divided, factor))
    for path in _paths(fields):
        yield _without(fields, path)


def _changed(fields: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Fields with other values, also in configurations inside; what becomes None is left out."""
    given = {name: change.get(name, value) for name, value in fields.items() if change.get(name, 0) is not None}
    return {name: _changed(value, change) if isinstance(value, dict) else value for name, value in given.items()}


def _fields(kind: type[PreTrainedConfig], small: Callable[[str, Any], Any]) -> dict[str, Any]:
    default = kind()
    own = vars(default)
    renamed = {value: name for name, value in kind.attribute_map.items()}
    fields: dict[str, Any] = {}
    subs = set(getattr(kind, "sub_configs", None) or ())
    for name, value in own.items():
        if name in subs or isinstance(value, PreTrainedConfig):
            if isinstance(value, PreTrainedConfig):
                with contextlib.suppress(Exception):  # its fields do not fit together by themselves
                    fields[name] = type(value)(**_fields(type(value), small)).to_dict()
        elif not name.startswith("_") and name not in kind.attribute_map:
            smaller = small(renamed.get(name, name) if renamed.get(name) in FIELDS else name, value)
            if smaller is not None:
                fields[name] = smaller
    fields["num_labels"] = LABELS
    if own.get("num_key_value_heads") == own.get("num_attention_heads", 0):
        fields |= {"num_key_value_heads": 4} if "num_key_value_heads" in fields else {}
    types = own.get("layer_types")
    if types is not None:
        kinds = list(dict.fromkeys(types))
        fields["layer_types"] = [kinds[number % len(kinds)] for number in range(4)]
    return fields


def _paths(fields: dict[str, Any], sizes_only: bool = False) -> list[tuple[str, ...]]:
    """The places of fields, also of those in configurations inside."""
    found: list[tuple[str, ...]] = []
    for name, value in fields.items():
        if isinstance(value, dict):
            found += [(name, *path) for path in _paths(value, sizes_only=True)]
        elif not sizes_only or (name in FIELDS and value == FIELDS[name]):
            found.append((name,))
    return found


def _without(fields: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    name, *inside = path
    if not inside:
        return {key: value for key, value in fields.items() if key != name}
    return {**fields, name: _without(fields[name], tuple(inside))}


def _filled(name: str, value: Any) -> Any:
    """As `_small`, and also what is None."""
    return FIELDS.get(name) if value is None and name in FIELDS else _small(name, value)


def _divided(factor: int, name: str, value: Any) -> Any:
    """As `_small`, but widths keep their ratios, and heads their number."""
    if name.endswith("heads"):
        return None
    if WIDTHS.search(name) and not NO_WIDTHS.search(name):
        if isinstance(value, int) and not isinstance(value, bool):
            return value // factor if value >= factor and not value % factor else None
        if isinstance(value, (list, tuple)) and value and all(isinstance(each, int) for each in value):
            return [max(each // factor, 1) for each in value]
        return None
    return _small(name, value)


def _small(name: str, value: Any) -> Any:
    """A smaller value of a field; None: it stays."""
    if name.endswith("token_id") and name in FIELDS:
        return FIELDS[name]
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int):
        if name in FIELDS:
            return FIELDS[name]
        if name.endswith(("token_id", "token_index")):
            return value % VOCABULARY if value >= VOCABULARY else None
        found = next((size for pattern, size in PATTERNS if pattern.search(name)), None)
        return None if found is None or value <= found else found
    if isinstance(value, (list, tuple)) and value and all(isinstance(each, int) and each > 0 for each in value):
        return _small_list(name, value)
    return None


def _small_list(name: str, values: Any) -> Any:
    if name.endswith("heads"):
        return [2] * len(values)
    if re.search(r"depths|layers|blocks", name):
        return [min(each, 2) for each in values]
    if re.search(r"hidden|embed|dim|channels|width|filters", name) and max(values) > 64:
        factor = max(values) // 64
        return [max(8, each // factor // 8 * 8) for each in values]
    return None
