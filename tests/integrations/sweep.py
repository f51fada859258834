"""Walks the auto classes of transformers: compares each model in a pipe with itself by `pipe.verify`, writes a table.

    python -m tests.integrations.sweep docs/architectures.csv                 # all of them; about an hour
    python -m tests.integrations.sweep /tmp/some.csv "causal LM" "masked LM"

Each model has a process of its own with a time limit. A model with several thousand labels, or one that needs more than
a configuration, is not built, and what is printed says why.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from pipework import PipeWarning
from pipework.attached import attach
from tests.integrations.building import CHUNKS, TASKS, built, classes, said
from tests.integrations.comparing import units_of


@dataclass(frozen=True)
class Outcome:
    """What became of one model.

    Attributes:
        task: of `TASKS`.
        model_type: as transformers calls it.
        model: its class.
        result: "exact" (bit for bit), "last bits" (some gradients are summed in another order), "random" (the model
            differs from itself when it is run twice), "refused" by `attach`, "not built" (the model itself does not
            train with a small configuration), "differs", or "failed" (an error that is no refusal).
        note: what differs, or why it was not trained.
    """

    task: str
    model_type: str
    model: str
    result: str
    note: str = ""


def compared(task: str, model_type: str, name: str) -> Outcome:
    """Compares one model that is cut in halves with itself, in training with dropout, and in evaluation."""
    here = (task, model_type, name)
    try:
        model, batch = built(*here)
    except ValueError as error:
        return Outcome(*here, "not built", str(error))
    sample = {each: value[:2] for each, value in batch.items()}
    found = []
    try:
        units = units_of(model, sample)
        pipe = attach(model, sample, chunks=CHUNKS, devices=["cpu"] * 2, balance=[units // 2, units - units // 2])
        for training in (True, False):
            model.train(training)
            found.append(pipe.verify(**batch))
    except Exception as error:
        # A leaf that a forward makes for itself is only found in the graph.
        is_refused = isinstance(error, ValueError) or "without reading it from its module" in str(error)
        return Outcome(*here, "refused" if is_refused else "failed", said(error))
    lines = [line for each in found for line in each.compared]
    if wrong := {line.against for line in lines if line.first}:
        return Outcome(*here, "random" if "itself, again" in wrong else "differs", "\n".join(map(str, found)))
    is_exact = not any(line.difference for line in lines if line.against == "micro-batches")
    return Outcome(*here, "exact" if is_exact else "last bits")


def imported_once() -> None:
    """Imports what every process would import for itself."""
    for name in ("torch._dynamo", "transformers.models.llama.modeling_llama", "pipework.integrations.transformers"):
        importlib.import_module(name)


def in_process(task: str, model_type: str, name: str, limit: int) -> Outcome:
    """`compared` in a process of its own, which ends at a limit in seconds."""
    context = multiprocessing.get_context("fork")
    receives, sends = context.Pipe(duplex=False)

    def run() -> None:
        try:
            outcome = compared(task, model_type, name)
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            note = f"{said(error)} ({Path(where.filename).name}:{where.lineno})"
            outcome = Outcome(task, model_type, name, "failed", note)
        sends.send(outcome)

    process = context.Process(target=run)
    process.start()
    sends.close()
    try:
        if receives.poll(limit):
            return receives.recv()
    except EOFError:  # it crashed
        pass
    finally:
        process.kill()
        process.join()
    return Outcome(task, model_type, name, "not built", f"no result within {limit} s")


def main() -> None:
    """Runs the sweep."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    warnings.simplefilter("ignore", PipeWarning)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    imported_once()
    lines = ["architecture,task,result"]
    for task in sys.argv[2:] or TASKS:
        names = [name for _, name in classes(task)]
        for model_type, name in classes(task):
            outcome = in_process(task, model_type, name, limit=90)
            print(outcome, flush=True)
            which = f" ({model_type})" if names.count(name) > 1 else ""
            lines.append(f"{name}{which},{task.replace(',', '')},{outcome.result}")
    Path(sys.argv[1]).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
