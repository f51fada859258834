"""Walks the auto classes of transformers: trains each model with a pipe, and by itself, and writes a table.

    python -m tests.integrations.sweep docs/architectures.csv                 # all of them; about an hour
    python -m tests.integrations.sweep /tmp/some.csv "causal LM" "masked LM"

Each model has a process of its own with a time limit. A model with several thousand labels, or one that needs more than
a configuration, is not built, and what is printed says why.
"""

from __future__ import annotations

import copy
import importlib
import multiprocessing
import os
import sys
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from pipework import PipeWarning
from pipework.attached import attach
from tests.integrations.building import CHUNKS, TASKS, built, classes, said
from tests.integrations.comparing import (
    differences,
    joined,
    micro_batches,
    plain_backward,
    units_of,
    without_cache,
    without_randomness,
)

CLOSE = 1e-4


@dataclass(frozen=True)
class Outcome:
    """What became of one model.

    Attributes:
        task: of `TASKS`.
        model_type: as transformers calls it.
        model: its class.
        result: "exact" (bit for bit), "last bits" (some gradients are summed in another order), "random" (the model
            draws random numbers itself), "refused" by `attach`, "not built" (the model itself does not train with a
            small configuration), "differs", or "failed" (an error that is no refusal).
        note: what differs, or why it was not trained.
        dropout: the same of a step with the default probabilities: whether two cuts give equal results.
    """

    task: str
    model_type: str
    model: str
    result: str
    note: str = ""
    dropout: str = ""


def halves(count: int) -> list[int]:
    """A balance for two stages."""
    return [count // 2, count - count // 2]


def compared(task: str, model_type: str, name: str) -> Outcome:
    """Trains one model in both ways."""
    here = (task, model_type, name)
    try:
        original, batch = built(*here)
    except ValueError as error:
        return Outcome(*here, "not built", str(error))
    sample = {each: value[:2] for each, value in batch.items()}
    model = without_randomness(copy.deepcopy(original))
    reference, whole = copy.deepcopy(model), copy.deepcopy(model)
    options: dict[str, Any] = {"chunks": CHUNKS, "devices": ["cpu"] * 2}
    try:
        units = units_of(model, sample)
        pipe = attach(model, sample, balance=halves(units), **options)
    except ValueError as error:
        return Outcome(*here, "refused", said(error))
    try:
        loss = model(**batch).loss
        loss.backward()
    except Exception as error:
        # A leaf that a forward makes for itself is only found in the graph.
        is_refused = "without reading it from its module" in str(error)
        return Outcome(*here, "refused" if is_refused else "failed", said(error))
    weight = pipe._executor.settings.loss_weight
    wanted = plain_backward(reference, batch, weight or (lambda labels: torch.tensor(len(labels))), CHUNKS)
    found = differences(model, reference)
    notes = []
    if not torch.equal(loss.detach(), wanted):
        notes.append(f"loss off by {abs(float(loss.detach() - wanted)):.0e}")
    if found.names:
        notes.append(f"{len(found.names)} gradients, {found.worst:.0e}: {', '.join(found.names[:2])}")
    is_close = found.worst < CLOSE and abs(float(loss.detach() - wanted)) < CLOSE
    result = "exact" if not notes else "last bits" if is_close else "differs"
    evaluated = evaluation(model, reference, batch)
    if evaluated:
        notes.append(evaluated)
        result = "differs"
    with torch.no_grad():
        at_once = whole(**batch, **without_cache(whole)).loss
    if abs(float(at_once - wanted)) > 1e-3 * max(1.0, abs(float(wanted))):
        notes.append(
            f"the loss of the mini-batch at once is {float(at_once):.4f}, the weighted mean {float(wanted):.4f}"
        )
    of_cuts = with_dropout(original, sample, batch, options, units)
    if result == "differs" and not evaluated and of_cuts == "equal" and is_random(whole, batch):
        result = "random"
    return Outcome(*here, result, "; ".join(notes), of_cuts)


def is_random(model: nn.Module, batch: dict[str, Tensor]) -> bool:
    """Whether the losses of two runs of a model without a pipe differ in training."""
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            losses.append(model(**batch, **without_cache(model)).loss)
    return not torch.equal(*losses)


def evaluation(model: nn.Module, reference: nn.Module, batch: dict[str, Tensor]) -> str:
    """What differs of the logits in evaluation; nothing: they are equal."""
    model.eval()
    reference.eval()
    with torch.no_grad():
        try:
            got = model(**batch).logits
        except Exception as error:
            return f"evaluation: {said(error)}"
        wanted = joined([reference(**part, **without_cache(reference)) for part in micro_batches(batch, CHUNKS)])
    if torch.equal(got, wanted):
        return ""
    return f"logits in evaluation differ by {float((got - wanted).abs().max()):.0e}"


def with_dropout(
    original: nn.Module, sample: dict[str, Tensor], batch: dict[str, Tensor], options: dict[str, Any], units: int
) -> str:
    """Whether two cuts give the same with the default probabilities."""
    models, losses = [], []
    for balance in (halves(units), [1, units - 1]):
        model = copy.deepcopy(original)
        try:
            attach(model, sample, balance=balance, **options)
            torch.manual_seed(7)
            loss = model(**batch).loss
            loss.backward()
        except Exception as error:
            return said(error)
        models.append(model)
        losses.append(loss.detach())
    found = differences(*models)
    if torch.equal(*losses) and not found.names:
        return "equal"
    if abs(float(losses[0] - losses[1])) < CLOSE and found.worst < CLOSE:
        return f"{len(found.names)} gradients differ by up to {found.worst:.0e} of their largest element"
    return f"differs: loss {float(losses[0] - losses[1]):.0e}, {len(found.names)} gradients, {found.worst:.0e}"


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
