"""Walks the auto classes of transformers: trains each model with a pipe, and by itself, and writes a table.

    python -m tests.integrations.sweep --lines outcomes.jsonl                 # all of them; about an hour
    python -m tests.integrations.sweep --lines outcomes.jsonl --again --tasks "causal LM" --only llama gpt2
    python -m tests.integrations.sweep --lines outcomes.jsonl --tasks --table docs/architectures

Each model has a process of its own with a time limit. A model with several thousand labels, or one that needs more than
a configuration, is left out, and the table says why.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
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
    without_cache,
    without_randomness,
)
from tests.integrations.outcomes import Outcome, outcomes_in, page, table

INTRODUCTION = """\
Each model of the auto classes of transformers was made with a small configuration
(`tests/integrations/shrinking.py`) and random values, and trained for one step: with a pipe of two stages and four
micro-batches, and by itself, micro-batch by micro-batch, without dropout. Losses, all gradients, and the logits of an
evaluation were compared bit for bit. A second step with dropout compares two cuts.

{download}`architectures.csv` has the result of each model. `python -m tests.integrations.sweep` writes both."""
CLOSE = 1e-4


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
    weight = pipe._executor.settings.loss.weight
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


def units_of(model: nn.Module, sample: dict[str, Tensor]) -> int:
    """How many groups of units a model has."""
    from pipework.integrations import adapter_for
    from pipework.model.parts.cut import Cuttable

    return len(Cuttable(model, sample, blocks=None, adapter=adapter_for(model)).groups)


def imported_once() -> None:
    """Imports what every process would import for itself."""
    for name in ("torch._dynamo", "transformers.models.llama.modeling_llama", "pipework.integrations.transformers"):
        importlib.import_module(name)


def in_process(task: str, model_type: str, name: str, limit: int) -> Outcome:
    """`compared` in a process of its own, which ends at a limit in seconds."""
    reads, writes = os.pipe()
    began = time.perf_counter()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(limit)
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 2)
                os.dup2(nowhere.fileno(), 1)
            try:
                outcome = compared(task, model_type, name)
            except BaseException as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                outcome = Outcome(
                    task, model_type, name, "failed", f"{said(error)} ({Path(where.filename).name}:{where.lineno})"
                )
            os.write(writes, outcome.line.encode())
        finally:
            os._exit(0)
    os.close(writes)
    with open(reads, "rb") as file:
        text = file.read()
    os.waitpid(child, 0)
    seconds = round(time.perf_counter() - began, 1)
    if not text:
        return Outcome(task, model_type, name, "not built", f"no result within {limit} s", seconds=seconds)
    return Outcome(**{**json.loads(text), "seconds": seconds})


def made() -> str:
    """With which versions."""
    import pipework

    return (
        f"Made with transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]} and "
        f"pipework {pipework.__version__}."
    )


def main() -> None:
    """Runs the sweep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), help="of the auto classes; none: a table alone")
    parser.add_argument("--only", nargs="*", help="model types or classes")
    parser.add_argument("--limit", type=int, default=90, help="seconds for each model")
    parser.add_argument("--lines", type=Path, help="outcomes are added here; models that are in it are left out")
    parser.add_argument("--again", action="store_true", help="models that are in it are run again")
    parser.add_argument("--table", type=Path, help="where to write the page (.md) and the table (.csv) of all outcomes")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    warnings.simplefilter("ignore", PipeWarning)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    imported_once()
    lines = arguments.lines
    outcomes = outcomes_in([lines]) if lines is not None and lines.exists() else []
    done = set() if arguments.again else {(each.task, each.model_type, each.model) for each in outcomes}
    for task in arguments.tasks:
        for model_type, name in classes(task):
            if (arguments.only and not {model_type, name} & {*arguments.only}) or (task, model_type, name) in done:
                continue
            outcome = in_process(task, model_type, name, arguments.limit)
            outcomes.append(outcome)
            print(outcome.line, flush=True)
            if lines is not None:
                with lines.open("a") as file:
                    file.write(outcome.line + "\n")
    if arguments.table:
        order = {(task, *each): number for task in TASKS for number, each in enumerate(classes(task))}
        last = {(each.task, each.model_type, each.model): each for each in outcomes}
        found = [last[key] for key in order if key in last]
        arguments.table.with_suffix(".md").write_text(page(found, made(), INTRODUCTION))
        arguments.table.with_suffix(".csv").write_text(table(found))


if __name__ == "__main__":
    main()
