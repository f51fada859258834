"""Walks transformers, diffusers and trainers, compares each model in a pipe with itself, writes `docs/breadth.csv`.

    python -m tests.integrations.sweep --minutes 20
    python -m tests.integrations.sweep --minutes 5 diffusers trainers "causal LM"

A model has a row in `docs/breadth.csv`. Models without a row come first, then those with the oldest rows; the order is
drawn from a seed, and each task has its turn. So a run of a few minutes adds a sample, and runs one after another make
all rows. The counts in `docs/breadth.md` are written again, too.

Each model has a process of its own with a time limit. A model with several thousand labels, or one that needs more than
a configuration, is not built, and its row says why.
"""

from __future__ import annotations

import argparse
import copy
import csv
import datetime
import importlib
import importlib.metadata
import importlib.util
import io
import multiprocessing
import os
import random
import re
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipework import PipeWarning
from pipework.attached import attach
from tests.integrations import denoisers
from tests.integrations.building import CHUNKS, TASKS, built, classes, said
from tests.integrations.comparing import units_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "breadth.md"
RESULTS = ("exact", "last bits", "batch norm", "random", "refused", "not built", "differs", "failed")
TRAINERS = {  # the library of a trainer, and the tests that compare its training with and without a pipe
    "Trainer": ("transformers", "test_trainer.py", "training_is_that and not gpu"),
    "Accelerator": ("accelerate", "test_accelerate.py", "loop"),
    "LightningModule": ("pytorch-lightning", "test_lightning.py", "training"),
    "SFTTrainer": ("trl", "test_trl.py", "training_is_that and sft"),
    "DPOTrainer": ("trl", "test_trl.py", "training_is_that and dpo"),
    "RewardTrainer": ("trl", "test_trl.py", "training_is_that and reward"),
}


@dataclass(frozen=True)
class Outcome:
    """What became of one model: a row of `docs/breadth.csv`.

    Attributes:
        model: its class, with the model's type if several types have the class.
        task: of `TASKS`, "diffusers" or "trainers".
        result: "exact" (bit for bit), "last bits" (some gradients are summed in another order), "batch norm" (exact,
            but the whole batch has other statistics than its micro-batches), "random" (the model differs from itself
            when it is run twice), "refused" by `attach`, "not built" (the model itself does not train with a small
            configuration, or a library is missing), "differs", or "failed" (an error that is no refusal).
        lines: that a user writes: 1 for `attach`, 2 if the loss is outside of the pipe, 0 if it cannot be trained.
        note: what differs, or the sentence with which it was refused; of 2 lines, the refusal of the model's own loss.
        made: when, and with which library.
    """

    model: str
    task: str
    result: str
    lines: int = 0
    note: str = ""
    made: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return self.task, self.model


def everything() -> dict[tuple[str, str], str]:
    """The model type of each task and model; "" outside of transformers."""
    found = {}
    for task in TASKS:
        names = Counter(name for _, name in classes(task))
        found |= {
            (task, f"{name} ({model_type})" if names[name] > 1 else name): model_type
            for model_type, name in classes(task)
        }
    return found | {("diffusers", name): "" for name in denoisers.DENOISERS} | {("trainers", n): "" for n in TRAINERS}


def rows_of(path: Path) -> dict[tuple[str, str], Outcome]:
    """The rows of a table, by task and model."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = [Outcome(**each | {"lines": int(each["lines"])}) for each in csv.DictReader(file)]
    return {row.key: row for row in rows}


def counts_of(rows: Iterable[Outcome]) -> str:
    """A table of how many models of each task have which result."""
    heads = ("1 line", "2 lines", "random", "refused", "not built", "wrong")
    of_lines = {1: "1 line", 2: "2 lines"}
    counted: dict[str, Counter[str]] = {task: Counter() for task in (*TASKS, "diffusers", "trainers")}
    for row in rows:
        counted[row.task][of_lines.get(row.lines, row.result if row.result in heads else "wrong")] += 1
    counted["all"] = sum(counted.values(), Counter())
    lines = [["task", *heads], ["---"] * (len(heads) + 1)]
    lines += [[task, *(str(found[head]) for head in heads)] for task, found in counted.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def write(rows: Mapping[tuple[str, str], Outcome]) -> None:
    """Writes the table, and its counts at the end of the page."""
    order = {key: number for number, key in enumerate(everything())}
    kept = [rows[key] for key in sorted(rows.keys() & order.keys(), key=order.__getitem__)]
    text = io.StringIO()
    writer = csv.DictWriter(text, [each.name for each in fields(Outcome)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(asdict, kept))
    PAGE.with_suffix(".csv").write_text(text.getvalue())
    head, found, _ = PAGE.read_text().partition("| task |")
    assert found
    PAGE.write_text(head + counts_of(kept))


def compared(task: str, model: str) -> Outcome:
    """Compares one model with itself: with its own loss, and if that is refused with the loss outside of the pipe."""
    start = Outcome(model, task, "not built")
    try:
        if task == "diffusers":
            module, batch = denoisers.built(model)
        else:
            module, batch = built(task, everything()[task, model], model.split(" (")[0])
    except (ValueError, ImportError) as error:
        return replace(start, note=str(error))
    has_loss = "labels" in batch
    first = replace(start, **(pair_compared(copy.deepcopy(module), batch, 1) if has_loss else {}))
    if has_loss and first.result != "refused":
        return first
    unlabelled = {name: value for name, value in batch.items() if name != "labels"}
    second = replace(start, **pair_compared(module, unlabelled, 2))
    if not has_loss:
        return second
    return replace(second, note=first.note) if second.lines else first


def pair_compared(model: nn.Module, batch: Mapping[str, Any], lines: int) -> dict[str, Any]:
    """Cuts one model in halves, and compares it with itself, in training with dropout, and in evaluation."""
    sample = {each: value[:2] if isinstance(value, torch.Tensor) else value for each, value in batch.items()}
    found = []
    try:
        units = units_of(model, sample)
        balance = [units // 2, units - units // 2]
        schedule = "1f1b" if lines == 1 else "gpipe"
        pipe = attach(model, sample, chunks=CHUNKS, devices=["cpu"] * 2, balance=balance, schedule=schedule)
        for training in (True, False):
            model.train(training)
            found.append(pipe.verify(**batch))
    except Exception as error:
        # A leaf that a forward makes for itself is only found in the graph.
        is_refused = isinstance(error, ValueError) or "without reading it from its module" in str(error)
        sentence = re.split(r"(?<![ .])\. ", said(error))[0]
        return {"result": "refused" if is_refused else "failed", "note": sentence}
    compared = [line for each in found for line in each.compared]
    if wrong := {line.against: f"{line.what}, {line.difference:.1g}: {line.first}" for line in compared if line.first}:
        note = "; ".join(f"{against}: {each}" for against, each in wrong.items())[:400]
        if wrong.keys() == {"whole batch"} and any(isinstance(each, _BatchNorm) for each in model.modules()):
            return {"result": "batch norm", "lines": lines, "note": note}
        return {"result": "random" if "itself, again" in wrong else "differs", "note": note}
    most = max(line.difference for line in compared if line.against == "micro-batches")
    if most:
        return {"result": "last bits", "lines": lines, "note": f"{most:.1g}"}
    return {"result": "exact", "lines": lines}


def trained(library: str, file: str, tests: str, limit: int) -> dict[str, Any]:
    """Runs the tests of a trainer, for at most a limit in seconds."""
    if importlib.util.find_spec(library.replace("-", "_")) is None:
        return {"note": f"{library} is not installed"}
    path = f"tests/integrations/{file}"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", "-p", "no:cacheprovider", path, "-k", tests]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"note": f"{path}: no result within {limit} s"}
    if done.returncode:
        return {"result": "failed", "note": f"{path}: {done.stdout.splitlines()[-1]}"}
    return {"result": "exact", "lines": 1, "note": path}


def imported_once() -> None:
    """Imports what every process would import for itself."""
    for name in ("torch._dynamo", "transformers.models.llama.modeling_llama", "pipework.integrations.transformers"):
        importlib.import_module(name)


def in_process(task: str, model: str, limit: int) -> Outcome:
    """`compared` in a process of its own, which ends at a limit in seconds."""
    context = multiprocessing.get_context("fork")
    receives, sends = context.Pipe(duplex=False)

    def run() -> None:
        try:
            outcome = compared(task, model)
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            outcome = Outcome(model, task, "failed", 0, f"{said(error)} ({Path(where.filename).name}:{where.lineno})")
        sends.send(outcome)

    process = context.Process(target=run)
    process.start()
    sends.close()
    outcome = Outcome(model, task, "not built", 0, f"no result within {limit} s")
    try:
        if receives.poll(limit):
            outcome = receives.recv()
    except EOFError:  # it crashed
        outcome = replace(outcome, result="failed", note="the process crashed")
    finally:
        process.kill()
        process.join()
    return outcome


def row_of(task: str, model: str, limit: int) -> Outcome:
    """The row of a model; its limit is in seconds. The tests of a trainer may take ten times as long."""
    library = TRAINERS[model][0] if task == "trainers" else "diffusers" if task == "diffusers" else "transformers"
    if task == "trainers":
        outcome = replace(Outcome(model, task, "not built"), **trained(*TRAINERS[model], 10 * limit))
    else:
        outcome = in_process(task, model, limit)
    version = importlib.metadata.version(library) if importlib.util.find_spec(library.replace("-", "_")) else "missing"
    return replace(outcome, made=f"{datetime.date.today()} {library} {version}")


def next_models(rows: Mapping[tuple[str, str], Outcome], tasks: Iterable[str], seed: int) -> list[tuple[str, str]]:
    """Models of some tasks: those without a row first, then the oldest; in a drawn order, each task in its turn."""
    generator, turns = random.Random(seed), {}
    for task in tasks:
        models = [key for key in everything() if key[0] == task]
        turns |= {key: turn for turn, key in enumerate(generator.sample(models, len(models)))}
    return sorted(turns, key=lambda key: (rows[key].made.split()[0] if key in rows else "", turns[key]))


def main() -> None:
    """Runs the sweep."""
    parser = argparse.ArgumentParser(description="Writes docs/breadth.csv.")
    parser.add_argument("tasks", nargs="*", default=[*TASKS, "diffusers", "trainers"])
    parser.add_argument("--minutes", type=float, default=20, help="no model begins afterwards (%(default)s)")
    parser.add_argument("--limit", type=int, default=90, help="seconds for a model (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the order (%(default)s)")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    warnings.simplefilter("ignore", PipeWarning)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    imported_once()
    ends, rows = time.monotonic() + 60 * options.minutes, rows_of(PAGE.with_suffix(".csv"))
    for key in next_models(rows, options.tasks, options.seed):
        if time.monotonic() > ends:
            break
        rows[key] = row_of(*key, limit=options.limit)
        print(rows[key], flush=True)
        write(rows)


if __name__ == "__main__":
    main()
