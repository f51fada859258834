"""The cases: which models, on which parts of the card, in which ways."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from benchmarks.gpu import parts, ways
from benchmarks.gpu.card import Card
from benchmarks.gpu.llama import llama, llama_graphs
from benchmarks.gpu.measure import Case
from benchmarks.gpu.task import Task, loss_of
from benchmarks.gpu.ways import Way
from pipework import Pipe
from pipework.schedule import schedule_spec

SHORT = 128  # tokens with which gradients are compared; fewer than those that are measured
ONE_THREAD = "one thread"
# On the CPU, where the models only have to run.
TINY = Task(width=16, blocks=8, chunks=4, rows=1, tokens=8)


def plain(card: Card) -> Case:
    """The plain model on the whole card."""
    task = Task(width=1024, blocks=16, chunks=8, rows=2, tokens=1024) if card.is_gpu else TINY
    return _case(task, card, _plain(task, card, None))


def one_stage(card: Card) -> Case:
    """Pipes of one stage on the whole card, of three libraries."""
    task = Task(width=1024, blocks=16, chunks=8, rows=2, tokens=1024) if card.is_gpu else TINY

    def ours(**options: Any) -> Way:
        return ways.pipe_way(_pipe(task, card, "1f1b", 1, **options), card.sms)

    return _case(
        task,
        card,
        {
            "plain": lambda: ways.plain(task.model(card), loss_of, task.chunks, card.sms),
            "pipework": ours,
            "torch.distributed.pipelining": lambda: ways.of_pytorch(task.model(card), loss_of, task.chunks, card),
            "torchgpipe": lambda: ways.of_torchgpipe(task.model(card), loss_of, task.chunks, card),
        },
    )


def two_parts(card: Card) -> Case:
    """Large layers on two halves of the card: the device is the limit."""
    task = Task(width=2048, blocks=8, chunks=8, rows=2, tokens=2048) if card.is_gpu else TINY
    return _on_parts(task, card, 2, ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v"))


def four_parts(card: Card) -> Case:
    """Middling layers on four quarters of the card."""
    task = Task(width=1024, blocks=16, chunks=16, rows=2, tokens=1024) if card.is_gpu else TINY
    return _on_parts(task, card, 4, ("1f1b", "zb-h1"))


def four_parts_small(card: Card) -> Case:
    """A model of GPT-2's size on four quarters of the card: the host is the limit."""
    task = Task(width=768, blocks=12, chunks=16, rows=1, tokens=512) if card.is_gpu else TINY
    return _on_parts(task, card, 4, ("1f1b",))


def graphs(card: Card) -> Case:
    """Middling layers on four quarters of the card, as graphs of actions."""
    task = Task(width=1024, blocks=16, chunks=16, rows=2, tokens=1024) if card.is_gpu else TINY
    return _captured(task, card, 4, ("1f1b", "zb-h1"))


def graphs_small(card: Card) -> Case:
    """A model of GPT-2's size on four quarters of the card, as graphs of actions."""
    task = Task(width=768, blocks=12, chunks=16, rows=1, tokens=512) if card.is_gpu else TINY
    return _captured(task, card, 4, ("1f1b", "zb-h1"))


# All have a limited time together, so the longer ones come before the last.
CASES: Mapping[str, Callable[[Card], Case | None]] = MappingProxyType(
    {
        "plain": plain,
        "one-stage": one_stage,
        "two-parts": two_parts,
        "four-parts": four_parts,
        "llama": llama,
        "four-parts-small": four_parts_small,
        "graphs-small": graphs_small,
        "graphs": graphs,
        "llama-graphs": llama_graphs,
    }
)


def _case(task: Task, card: Card, made: Mapping[str, Callable[[], Way | None]]) -> Case:
    short = task.batch(card, min(SHORT, task.tokens // 2))
    return Case(task.batch(card), short, task.mini_batch_tokens, task.flops(), made)


def _plain(task: Task, card: Card, part: parts.Part | None) -> dict[str, Callable[[], Way | None]]:
    """The plain model, and as a graph, on the whole card or on a part."""
    sms, own = (card.sms, None) if part is None else (part.sms, part.stream)

    def eager() -> Way:
        return ways.plain(task.model(card), loss_of, task.chunks, sms, own)

    def graph() -> Way:
        return ways.as_graph(eager(), card, task.batch(card), own or torch.cuda.Stream(card.device))

    return {"plain": eager, **({"plain as a graph": graph} if card.is_gpu else {})}


def _on_parts(task: Task, card: Card, count: int, schedules: tuple[str, ...]) -> Case:
    """The plain model on one part, and pipes with a worker on each."""
    on = parts.split(count) if card.is_gpu else []
    sms = sum(part.sms for part in on) or card.sms
    made = _plain(task, card, on[0] if on else None)

    def pipe(schedule: str, one_thread: bool) -> Way:
        return ways.pipe_way(_pipe(task, card, schedule, count, debug="one_thread" if one_thread else ()), sms, on)

    for schedule in schedules:
        made[schedule] = lambda schedule=schedule: pipe(schedule, one_thread=False)
    made[f"1f1b, {ONE_THREAD}"] = lambda: pipe("1f1b", one_thread=True)
    if on:
        # Captured in the stream of the first worker: what it waits for and what waits for it are in the graph, too.
        made["1f1b as a graph"] = lambda: ways.as_graph(
            pipe("1f1b", one_thread=True), card, task.batch(card), on[0].stream
        )
    return _case(task, card, made)


def _captured(task: Task, card: Card, count: int, schedules: tuple[str, ...]) -> Case:
    """The plain model on one part as a graph, its stages at once, and pipes that capture their actions."""
    on = parts.split(count) if card.is_gpu else []
    sms = sum(part.sms for part in on) or card.sms
    batch, each = task.batch(card), task.blocks // count

    def at_once() -> Way:
        layers = list(task.model(card))
        models = [nn.Sequential(*layers[each * n : each * (n + 1)]) for n in range(count)]
        return ways.at_once(models, loss_of, (batch, task.chunks), card, on)

    made = _plain(task, card, on[0] if on else None) | {ways.AT_ONCE: at_once}
    how = True if card.is_gpu else "auto"  # the CPU has no graphs
    for schedule in schedules:
        made[f"{schedule}, {ways.GRAPHS}"] = lambda schedule=schedule: ways.pipe_way(
            _pipe(task, card, schedule, count, graphs=how), sms, on
        )
    return _case(task, card, made)


def _pipe(task: Task, card: Card, schedule: str, workers: int, **options: Any) -> Pipe:
    stages = workers * schedule_spec(schedule).stages_per_worker
    ends = [task.blocks * number // stages for number in range(stages + 1)]
    balance = [end - start for start, end in itertools.pairwise(ends)]
    model: nn.Sequential = task.model(card)
    return Pipe(
        model, task.chunks, "never", balance=balance, devices=[card.device] * workers, schedule=schedule,
        loss_fn=loss_of, **options,
    )  # fmt: skip
