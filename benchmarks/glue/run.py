"""What does it cost that every part of a model runs the model's own forward, and what goes from part to part?

A model that `attach` has cut runs its forward once in each part: units of other parts return what they gave, and what
is between the units (masks, positions, residuals) runs again. Units are tiny here, so that nearly everything is the
host's time. The plain forward and chains of parts take turns, one micro-batch each, without a pipe. What the model's
own forward costs that runs again is measured beside it: a copy whose units return what they once gave, until the part
ends. Beside the times stand the bytes that each message holds, and those of the hidden states alone.

Python 3.11 keeps frames in pieces of 16 kB. Where a call that is made often is the first one of a piece, it takes
microseconds more, which depends on how deep the stack is. So each time is the shortest at several depths, which take
turns, too.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import harness
from benchmarks.harness import Verdict
from pipework import to_sequential
from pipework.values import nested

WIDTH, TOKENS, ROWS, WORDS = 32, 16, 2, 64
TARGET = 1.5  # blocks
DEPTHS = range(0, 60, 7)


class Block(nn.Module):
    """A perceptron with a norm and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + mask * self.down(functional.gelu(self.up(self.norm(x))))


class Own(nn.Module):
    """A model with a forward of its own."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        mask = (input_ids != 0).unsqueeze(-1)
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(x)
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def llama(blocks: int) -> nn.Module:
    """One of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=blocks,
            num_attention_heads=4, num_key_value_heads=2, use_cache=False,
        )
    )  # fmt: skip


MODELS = {"own": Own, "llama": llama}


def chain(layers: nn.Sequential, batch: dict[str, Tensor]) -> list[Any]:
    """What each part gives."""
    values = [layers[0](**batch)]
    for part in list(layers)[1:]:
        values.append(part(values[-1]))
    return values


class Recorded(nn.Module):
    """Returns what a unit has given; ends the forward where a part would."""

    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.__dict__["unit"] = unit
        self.gave: Any = None
        self.ends = False

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """What it gave."""
        if self.ends:
            raise EndOfPart
        return self.gave

    def __getattr__(self, name: str) -> Any:
        """An attribute of the unit."""
        return getattr(self.__dict__["unit"], name)


class EndOfPart(Exception):
    """The forward has come to a unit of a later part."""


def glue_alone(model: nn.Module, whole: nn.Sequential, batch: dict[str, Tensor]) -> list[Callable[[], object]]:
    """For each unit, the model's forward until there, with units that compute nothing."""
    units = {name: unit for part in whole for name, unit in part.units_here().items()}
    recorded = {name: Recorded(unit) for name, unit in units.items()}
    handles = [
        model.get_submodule(name).register_forward_hook(lambda module, _, gave, at=each: setattr(at, "gave", gave))
        for name, each in recorded.items()
    ]
    model(**batch)
    for handle in handles:
        handle.remove()
    memo = {id(model.get_submodule(name)): each for name, each in recorded.items()}
    stubbed = copy.deepcopy(model, memo)

    def until(unit: Recorded) -> None:
        unit.ends = True
        try:
            stubbed(**batch)
        except EndOfPart:
            unit.ends = False

    return [lambda unit=unit: until(unit) for unit in recorded.values()]


def deeper(depth: int, run: Callable[[], float]) -> float:
    """Runs something as many calls below."""
    return run() if depth == 0 else deeper(depth - 1, run)


def computed(run: Callable[[], object]) -> harness.Candidate:
    """Seconds that this thread computes, which do not depend on what else runs on the machine; each time deeper."""
    depths = itertools.cycle(DEPTHS)

    def seconds() -> float:
        start = time.thread_time()
        run()
        return time.thread_time() - start

    return lambda: deeper(next(depths), seconds)


def message_bytes(value: Any) -> int:
    """Of its tensors."""
    tensors, _ = nested.flatten(value)
    return sum(tensor.nbytes for tensor in tensors)


def measure(name: str, blocks: int, counts: Sequence[int], rounds: int) -> dict[str, Any]:
    """Seconds of each way, and the bytes of the largest message."""
    torch.manual_seed(0)
    model = MODELS[name](blocks)
    ids = torch.randint(1, WORDS, (ROWS, TOKENS))
    batch = {"input_ids": ids, "labels": ids}
    whole = to_sequential(model, batch)
    untils = glue_alone(model, whole, batch)
    ways = {}
    candidates = {"plain": computed(lambda: model(**batch))}
    for count in counts:
        sizes = [len(whole) // count + (n < len(whole) % count) for n in range(count)]
        ways[count] = to_sequential(model, batch, balance=sizes)
        candidates[str(count)] = computed(lambda layers=ways[count]: chain(layers, batch))
        ends = [untils[sum(sizes[:number])] for number in range(1, count)]
        candidates[f"{count}, glue"] = computed(lambda ends=ends: [until() for until in ends])
    every = harness.alternate(candidates, rounds * len(DEPTHS))
    starts = range(0, rounds * len(DEPTHS), len(DEPTHS))
    times = {way: [min(seconds[start : start + len(DEPTHS)]) for start in starts] for way, seconds in every.items()}
    largest = max(map(message_bytes, chain(ways[counts[-1]], batch)[:-1]))
    return {"times": times, "bytes": largest, "units": len(whole)}


def main(argv: list[str] | None = None) -> None:
    options = harness.Options(__doc__)
    options.add_amount("--rounds", 60, 5, "of each way")
    options.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(default all)")
    options.add_argument("--blocks", type=int, default=24, help="of the model (default 24)")
    options.add_argument("--parts", type=int, nargs="+", default=[2, 4, 8], help="(default 2 4 8)")
    arguments = options.parse_args(argv)
    with harness.on_this_machine() as machine:
        measured = {
            name: measure(name, arguments.blocks, arguments.parts, arguments.rounds) for name in arguments.models
        }
    verdicts = report(measured, arguments.blocks)
    harness.conclude("glue", arguments, machine, verdicts, {"unit": "seconds of one micro-batch", "models": measured})


def report(measured: dict[str, dict[str, Any]], blocks: int) -> list[Verdict]:
    """Prints the table; returns the verdicts."""
    hidden = ROWS * TOKENS * WIDTH * 4
    rows, verdicts = [], []
    for name, found in measured.items():
        plain = median(found["times"]["plain"])
        block = plain / blocks
        for count, seconds in found["times"].items():
            if not count.isdecimal():
                continue
            more = (median(seconds) - plain) / int(count)
            glue = median(found["times"][f"{count}, glue"]) / int(count)
            cells = [*(f"{1e6 * each:.0f}" for each in (plain, block, more, glue, more - glue)), f"{more / block:.2f}"]
            rows.append([f"{name}, {count} parts", *cells, f"{found['bytes']:,} / {hidden:,}"])
            verdicts.append(Verdict(f"{name}, {count} parts: a part's forward again", more / block, TARGET, "blocks"))
    times = ["plain us", "a block us", "more in each part us", "the model's own", "ours", "in blocks"]
    header = ["", *times, "message / hidden states, bytes"]
    harness.print_table(header, rows)
    return verdicts


if __name__ == "__main__":
    main()
