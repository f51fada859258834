"""Ready-made functions for `split=`: the images of rows, and sequences that are packed into one row.

Models of vision and language take the images of all rows one behind the other, and each row has placeholders among its
tokens for its own images. So the placeholders up to the end of a row say which images come before that end:

    input_ids        row 0   . i i i i . j j .      images 0 and 1, with 4 and 2 placeholders
                     row 1   . . . . . . . . .      no image
                     row 2   k k k k k k . . .      image 2, with 6
    image_grid_thw   [1 4 4] [1 2 4] [1 4 6]        an entry for each image
    pixel_values     16      8       24             an entry for each patch; 4 patches have one placeholder
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from pipework.model.marks import WHOLE, Chunk, MicroBatches, NoChunk, flattened, has_micro_batches
from pipework.model.mini_batch import even_sizes
from pipework.model.row_dimensions import Layout
from pipework.values import nested

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipework.model.marks import Piece


class Media(NamedTuple):
    """What a model takes beside its tokens: images, or videos.

    Attributes:
        values: the argument that has the pixels: an entry for each image, or for each patch of the images.
        token: what the configuration calls the placeholder; "": `values` has an entry for each row, which is zero where
            a row has fewer images than others.
        kind: the number of a placeholder in `mm_token_type_ids`.
        sizes: the argument with the sizes of images, from which their placeholders follow; if it is "", or not given,
            all images have equally many.
        others: further arguments with an entry for each image.
    """

    values: str = "pixel_values"
    token: str = "image_token_id"
    kind: int = 1
    sizes: str = ""
    others: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """The names of all its arguments."""
        return [name for name in (self.values, self.sizes, *self.others) if name]


_GRIDS: Final = (
    Media(sizes="image_grid_thw"),
    Media("pixel_values_videos", "video_token_id", 2, "video_grid_thw", ("second_per_grid_ts",)),
)
_SIZES: Final = (Media(sizes="image_sizes"),)
_EQUAL: Final = (Media(),)
_OF_ROWS: Final = (Media(token="", others=("pixel_attention_mask",)),)

FAMILIES: Final[Mapping[str, tuple[Media, ...]]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm4v_moe", "glm46v"), _GRIDS),
    **dict.fromkeys(("gemma3", "internvl", "paligemma", "aya_vision"), _EQUAL),
    **dict.fromkeys(("llava", "mistral3"), _SIZES),
    **dict.fromkeys(("idefics2", "idefics3", "smolvlm"), _OF_ROWS),
}
"""What the models of a `model_type` take."""


def split_for(config: Any, sample: dict[str, Any], target: str) -> ImagesOfRows | PackedSequences | None:
    """The function that cuts the batches of a model; None: they are cut along rows, or as marks in the sample say.

    Args:
        config: of the model.
        sample: of `attach`, by names.
        target: the argument that the model's loss needs.

    Example:
        >>> from types import SimpleNamespace
        >>> sample = {"input_ids": torch.tensor([[9, 9], [1, 2], [9, 9]]), "pixel_values": torch.ones(2, 3, 4, 4)}
        >>> split = split_for(SimpleNamespace(model_type="gemma3", image_token_id=9), sample, "labels")
        >>> [None if each["pixel_values"] is None else len(each["pixel_values"]) for _, each, _ in split(\
(), sample, None, 3)]
        [1, None, 1]
    """
    ids, media = sample.get("input_ids"), FAMILIES.get(config.model_type, ())
    marked = (NoChunk, Chunk, MicroBatches)
    if not isinstance(ids, Tensor) or has_micro_batches((), sample):
        return None
    beside = [sample.get(name) for each in media for name in each.arguments]
    if any(sample.get(each.values) is not None for each in media):
        return None if any(isinstance(each, marked) for each in beside) else ImagesOfRows(config, media, sample, target)
    return PackedSequences(target) if len(_starts(sample)) > 1 else None


class ImagesOfRows:
    """Cuts along rows, and gives each micro-batch the images of its rows; None, if they have none.

    Args:
        config: see `split_for`.
        media: what the model takes.
        sample: see `split_for`.
        target: see `split_for`.

    Attributes:
        dim: along which tensors that the model returns are joined.

    Raises:
        ValueError: rows of the sample cannot be told.
    """

    dim = 0

    def __init__(self, config: Any, media: Sequence[Media], sample: dict[str, Any], target: str) -> None:
        self._config, self._media = config, media
        self._layout = Layout.of_sample((), target, (), self._of_rows(sample))

    def __call__(self, arguments: tuple[Any, ...], keywords: dict[str, Any], target: Any, chunks: int) -> list[Piece]:
        """See `split` of `Pipe`.

        Raises:
            ValueError: it cannot be told which images belong to which rows.
        """
        of_rows = self._of_rows(keywords)
        if target is not None:
            of_rows[self._layout.target] = target
        flat = flattened(((), of_rows))
        dims, rows, learned = self._layout.of_inputs((), of_rows, flat, chunks)
        if learned is not None and learned.doubts:
            raise ValueError(learned.doubts[0])
        sizes = even_sizes(rows, max(1, min(chunks, rows)))
        columns = [
            [tensor] * len(sizes) if dim == WHOLE else torch.split(tensor, sizes, dim)
            for tensor, dim in zip(flat[0], dims, strict=True)
        ]
        pieces = [nested.unflatten(each, flat[1])[1] for each in zip(*columns, strict=True)]
        ends = [0, *itertools.accumulate(sizes)]
        for media in self._media:
            given = {name: keywords[name] for name in media.arguments if name in keywords}
            values = given.get(media.values)
            bounds = [0] * (rows + 1) if values is None else self._bounds(media, keywords, rows)
            for piece, (first, last) in zip(pieces, itertools.pairwise(ends), strict=True):
                own = {
                    name: None if value is None else self._entries(media, name, given, bounds[first], bounds[last])
                    for name, value in given.items()
                }
                is_empty = bounds[first] == bounds[last] or (
                    not media.token and not given[media.values][first:last].any()
                )
                piece.update(dict.fromkeys(own) if is_empty else own)
        return [((), piece, None if target is None else piece.pop(self._layout.target)) for piece in pieces]

    def _of_rows(self, keywords: dict[str, Any]) -> dict[str, Any]:
        beside = {name for each in self._media for name in each.arguments}
        return {name: value for name, value in keywords.items() if name not in beside}

    def _bounds(self, media: Media, keywords: dict[str, Any], rows: int) -> list[int]:
        """How many images come before each row, and before the end."""
        if not media.token:
            return list(range(rows + 1))
        token, kinds, sizes = getattr(self._config, media.token), keywords.get("mm_token_type_ids"), None
        is_placeholder = keywords["input_ids"] == token if kinds is None else kinds == media.kind
        placeholders = is_placeholder.sum(1).tolist()
        if media.sizes:
            sizes = keywords.get(media.sizes)
        if sizes is None:
            images, total = len(keywords[media.values]), sum(placeholders)
            lengths = [total // max(images, 1)] * images
        else:
            lengths = self._placeholders(media, torch.as_tensor(sizes))
        before = {0: 0, **{end: number + 1 for number, end in enumerate(itertools.accumulate(lengths))}}
        bounds = [before.get(end) for end in (0, *itertools.accumulate(placeholders))]
        if (bounds[0], bounds[-1]) != (0, len(lengths)) or None in bounds:
            raise ValueError(
                f"it cannot be told which of the {len(lengths)} images in {media.values!r} belong to which row: the "
                f"rows have {placeholders} placeholders ({media.token} = {token}), and the images need {lengths}. Give "
                "each row the placeholders of its own images, in the order of the images; or cut the batch yourself, "
                "with split="
            )
        return bounds  # type: ignore[return-value]

    def _placeholders(self, media: Media, sizes: Tensor) -> list[int]:
        """How many placeholders images of these sizes have: one for each square of patches that the model merges."""
        vision = self._config.vision_config
        if media.sizes == "image_sizes":  # in pixels
            merged = vision.patch_size * getattr(self._config, "spatial_merge_size", 1)
            return (sizes // merged).prod(-1).tolist()  # type: ignore[no-any-return]
        return (sizes.prod(-1) // vision.spatial_merge_size**2).tolist()  # type: ignore[no-any-return]

    @staticmethod
    def _entries(media: Media, name: str, given: dict[str, Any], first: int, last: int) -> Any:
        """The entries of one argument for some images."""
        if name == media.values and media.sizes.endswith("grid_thw"):
            patches = given[media.sizes].prod(-1)
            first, last = int(patches[:first].sum()), int(patches[:last].sum())
        return given[name][first:last]


class PackedSequences:
    """Cuts one row of packed sequences between them, into micro-batches of about equally many tokens.

    Args:
        target: see `split_for`.

    Attributes:
        dim: see `ImagesOfRows`.
    """

    dim = 1

    def __init__(self, target: str) -> None:
        self._target = target

    def __call__(self, arguments: tuple[Any, ...], keywords: dict[str, Any], target: Any, chunks: int) -> list[Piece]:
        """See `split` of `Pipe`.

        Raises:
            ValueError: the batch is not one row of sequences.
        """
        starts, named = _starts(keywords), keywords if target is None else {**keywords, self._target: target}
        if not starts:
            raise ValueError(
                "the sample of attach had sequences that are packed into one row, and this batch has not: give one row "
                "with position_ids that begin with 0 in each sequence, or cut batches yourself, with split="
            )
        tokens = keywords["input_ids"].shape[1]
        cuts = sorted({0, *(min(starts, key=lambda start: abs(start - tokens * n / chunks)) for n in range(1, chunks))})
        pieces = [
            {name: self._of_tokens(name, value, named, *ends) for name, value in named.items()}
            for ends in itertools.pairwise([*cuts, tokens])
        ]
        return [((), piece, None if target is None else piece.pop(self._target)) for piece in pieces]

    @staticmethod
    def _of_tokens(name: str, value: Any, named: dict[str, Any], first: int, last: int) -> Any:
        kind = name.rpartition("_")[2]
        if name.startswith(("cu_seq_lens_", "max_length_")):
            offsets = named[f"cu_seq_lens_{kind}"]
            own = offsets[(offsets >= first) & (offsets <= last)] - first
            return own if name.startswith("cu") else int(own.diff().max())
        if not isinstance(value, Tensor):
            return value
        if value.shape[:2] != named["input_ids"].shape:
            raise ValueError(
                f"{name!r} has the shape {tuple(value.shape)}, and sequences are packed into one row of "
                f"{named['input_ids'].shape[1]} tokens: it cannot be told how it is cut; cut batches yourself, with "
                "split="
            )
        return value[:, first:last]


def _starts(keywords: Mapping[str, Any]) -> list[int]:
    """Where sequences begin that are packed into one row; none, if there are several rows, or a mask."""
    ids, positions, offsets = (keywords.get(name) for name in ("input_ids", "position_ids", "cu_seq_lens_q"))
    if not isinstance(ids, Tensor) or ids.dim() != 2 or len(ids) != 1 or keywords.get("attention_mask") is not None:
        return []
    if isinstance(offsets, Tensor):
        return offsets[:-1].tolist()
    if not isinstance(positions, Tensor) or positions.shape != ids.shape:
        return []
    return (positions[0] == 0).nonzero().flatten().tolist()
