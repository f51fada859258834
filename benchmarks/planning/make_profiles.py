"""Writes the profiles of this benchmark: models whose layers' times follow from their operations.

The unit of time of the Llama-like model is the forward of a micro-batch through an eighth of the model, so that its
figures compare with those of schedules of equal stages. For the others it is a second on a device of 100 TFLOP/s.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pipework.planning import Profile
from pipework.planning.layer_costs import DeviceKind, LayerBytes, LayerInfo, LayerSeconds, LinkSpeed, SkipBytes

FOLDER = Path(__file__).parent / "profiles"
RATE = 100e12  # operations a second
GRADIENT = 4  # bytes of a parameter


class Part(NamedTuple):
    """A layer: its time in the unit of its model, its parameters, and bytes for one row."""

    name: str
    type: str
    forward: float
    parameters: int
    kept: int
    output: int


def written(
    name: str,
    parts: Sequence[Part],
    batch: int,
    rows: Sequence[int],
    kinds: dict[str, float],
    *,
    memory: dict[str, int] | None = None,
    input_gradient: float = 1.0,
    weight_gradient: float = 1.0,
    links: dict[tuple[str, str], LinkSpeed] | None = None,
    skips: Sequence[tuple[int, int, int]] = (),
) -> None:
    """Write a profile; `kinds` are relative speeds, and times are for one row."""

    def seconds(part: Part, count: int, speed: float) -> LayerSeconds:
        forward = part.forward * count / speed
        return LayerSeconds(forward, forward * input_gradient, forward * weight_gradient if part.parameters else 0.0)

    before = [parts[0], *parts]
    Profile(
        batch=batch,
        rows=tuple(rows),
        layers=tuple(
            LayerInfo(each.name, each.type, each.parameters * GRADIENT, each.parameters * GRADIENT, 0)
            for each in parts
        ),
        bytes=tuple(
            tuple(
                LayerBytes(
                    given.output * count, each.kept * count, each.output * count, each.output * count,
                    (each.kept + each.output) * count, 0,
                )
                for given, each in zip(before, parts, strict=False)
            )
            for count in rows
        ),
        kinds={
            kind: DeviceKind(
                tuple(tuple(seconds(each, count, speed) for each in parts) for count in rows),
                memory=None if memory is None else memory[kind],
                estimated=True,
            )
            for kind, speed in kinds.items()
        },
        links=links or {},
        skips=tuple(SkipBytes(source, target, tuple(size * count for count in rows)) for source, target, size in skips),
    ).save(FOLDER / f"{name}.json")  # fmt: skip


def llama() -> None:
    """32 blocks in thirds, and a head as large as 2.4 blocks; a transfer takes 0.05, whatever its size."""
    width, third = 4096, 218_112_000 // 3
    unit = 32 + 2.4
    parts = [
        Part(f"{block}.{name}", name, 8 / unit / 3, third, 34 * width * 8192 // 3, 2 * width * 8192)
        for block in range(32)
        for name in ("Attention", "GateUp", "Down")
    ]
    parts.append(Part("head", "Head", 8 * 2.4 / unit, 525_336_576, 4 * 128_256 * 8192 // 8, 4))
    links = {("device", "device"): LinkSpeed(0.05, 1e15)}
    written("llama3_8b", parts, 32, (1, 2), {"device": 1.0}, input_gradient=1.1, weight_gradient=0.7, links=links)


def gpt2() -> None:
    """12 blocks of 768, and a head of 50,257 tokens, which takes longer than five of them; 1,024 tokens a row."""
    tokens, width = 1024, 768
    block = 12 * width * width
    embedding = 50_257 * width
    parts = [Part("embed", "Embedding", 1e-6, embedding, 0, 4 * tokens * width)]
    parts += [
        Part(
            f"h.{number}", "Block", (2 * block + 2 * tokens * width) * tokens / RATE, block,
            34 * tokens * width * 2, 4 * tokens * width,
        )
        for number in range(12)
    ]  # fmt: skip
    parts.append(Part("head", "Head", 2 * embedding * tokens / RATE, embedding, 6 * tokens * 50_257, 4))
    written("gpt2", parts, 64, (1, 2, 4, 8, 16), {"device": 1.0}, links={("device", "device"): LinkSpeed(1e-5, 25e9)})


def unet(name: str, kinds: dict[str, float], memory: dict[str, int] | None = None) -> None:
    """Five levels down and up: time halves with each level, parameters grow, and skips cross the middle."""
    pixels, channels = 256 * 256, 64
    down: list[Part] = []
    for level in range(5):
        size, width = pixels >> 2 * level, channels << level
        operations = 2 * 9 * width * width * size
        down += [
            Part(
                f"down{level}.{number}",
                "Down",
                operations / RATE,
                9 * width * width,
                12 * size * width,
                4 * size * width,
            )
            for number in range(2)
        ]
    up = [
        Part(f"up{each.name[4:]}", "Up", 2 * each.forward, 2 * each.parameters, 2 * each.kept, each.output)
        for each in down[::-1]
    ]
    parts = [*down, *up]
    count = len(parts)
    skips = [(index, count - 1 - index, parts[index].output) for index in range(1, len(down), 2)]
    ends = [(one, other) for one in kinds for other in kinds]
    links = {end: LinkSpeed(2e-5, 20e9) for end in ends}
    written(name, parts, 64, (1, 2, 4, 8, 16), kinds, memory=memory, links=links, skips=skips)


def main() -> None:
    """Write all profiles."""
    FOLDER.mkdir(exist_ok=True)
    llama()
    gpt2()
    unet("unet", {"device": 1.0})
    unet("unet_unequal", {"large": 1.0, "small": 0.6}, {"large": 24 * 2**30, "small": 16 * 2**30})


if __name__ == "__main__":
    main()
