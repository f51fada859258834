"""What became of each model of a sweep, and the page that says so."""

from __future__ import annotations

import collections
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

RESULTS = {
    "exact": "loss, gradients and logits are those of the model, bit for bit",
    "last bits": "the same, but some gradients are summed in another order",
    "random": "the model draws random numbers itself; all cuts of it give the same",
    "refused": "`attach` refuses it",
    "not built": "the model itself does not train with a small configuration",
    "differs": "another result than the model's",
    "failed": "an error that is no refusal",
}
REASONS = {
    r"^loss off by": "loss and gradients",
    r"at once is": "the loss is of all rows together, such as in a batch norm",
    r"^\d+ gradients": "some gradients",
    r"which units it calls": "leaves out layers at random: set that probability to 0",
    r"numpy\.random": "draws numbers from NumPy outside of its layers",
    r"attention\\?_type from outside": "sets an attribute of a layer from outside of it",
    r"puts a tensor into": "a layer hands a tensor on in an object",
    r"in place, outside": "changes a weight in place outside of its layer",
    r"without reading it from its module": "a layer makes a leaf that requires a gradient",
    r"million parameters|no tiny configuration|no result within": "too large, or too slow",
    r"^ImportError": "a library is missing",
    r"shape|size|factors|divisible|dimension|to have \d+ channels": "sizes do not fit together",
    r"": "the model raises another error",
}
"""The kinds of reasons, by a pattern for the sentence; the first that matches."""
OF_MINI_BATCHES = "at once is"


@dataclass(frozen=True)
class Outcome:
    """What became of one model.

    Attributes:
        task: of `TASKS`.
        model_type: as transformers calls it.
        model: its class.
        result: of `RESULTS`.
        note: what differs, or why it was not trained.
        dropout: the same of a step with the default probabilities: whether two cuts give equal results.
        seconds: in all.
    """

    task: str
    model_type: str
    model: str
    result: str
    note: str = ""
    dropout: str = ""
    seconds: float = 0.0

    @property
    def line(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))


def outcomes_in(files: list[Path]) -> list[Outcome]:
    """The outcomes in files of lines; of a model that occurs more often the last one."""
    read = [Outcome(**json.loads(line)) for file in files for line in file.read_text().splitlines()]
    return list({(each.task, each.model_type, each.model): each for each in read}.values())


def table(outcomes: list[Outcome]) -> str:
    """Comma-separated values: each model with its task and its result."""
    rows = [f"{_name(each, outcomes)},{each.task.replace(',', '')},{each.result}" for each in outcomes]
    return "\n".join(["architecture,task,result", *rows]) + "\n"


def page(outcomes: list[Outcome], made: str, introduction: str) -> str:
    """Markdown: counts by task, and each model that is not exact.

    Args:
        outcomes: of all models.
        made: with which versions.
        introduction: what was done.
    """
    present = [result for result in RESULTS if any(each.result == result for each in outcomes)]
    lines = ["# Architectures of transformers", "", *introduction.splitlines(), "", made, ""]
    lines += [*(f"- {result}: {RESULTS[result]}" for result in present), ""]
    lines += ["| task | " + " | ".join(present) + " |", "|---" * (len(present) + 1) + "|"]
    tasks = list(dict.fromkeys(each.task for each in outcomes))
    for task in (*tasks, "all"):
        counts = collections.Counter(each.result for each in outcomes if task in (each.task, "all"))
        lines.append(f"| {task} | " + " | ".join(str(counts[result]) for result in present) + " |")
    for result in present[1:]:
        these = [each for each in outcomes if each.result == result]
        lines += ["", f"## {result.capitalize()}", "", *_rows(these, outcomes, "note")]
    whole = [each for each in outcomes if each.result == "exact" and OF_MINI_BATCHES in each.note]
    lines += ["", "## Other loss", "", OTHER_LOSS, "", *_rows(whole, outcomes, "note")]
    odd = [each for each in outcomes if each.dropout not in ("", "equal")]
    lines += ["", "## With dropout", "", "Two cuts give the same with dropout, too, but for:", ""]
    return "\n".join([*lines, *_rows(odd, outcomes, "dropout")]) + "\n"


OTHER_LOSS = (
    "These are exact, but the loss of a whole mini-batch is another number than the mean of the losses of its "
    "micro-batches, with which a pipe trains:"
)


def _rows(these: list[Outcome], outcomes: list[Outcome], attribute: str) -> list[str]:
    """Models with the same kind of reason share an item of the list."""
    rows: dict[str, dict[str, None]] = {}
    for each in these:
        kind = next(kind for pattern, kind in REASONS.items() if re.search(pattern, getattr(each, attribute)))
        rows.setdefault(kind, {})[_name(each, outcomes)] = None
    return [f"- {kind}: {', '.join(names)}" for kind, names in rows.items()]


def _name(outcome: Outcome, outcomes: list[Outcome]) -> str:
    """The class, and the model type where a class occurs under several."""
    same = {each.model_type for each in outcomes if (each.task, each.model) == (outcome.task, outcome.model)}
    return outcome.model + (f" ({outcome.model_type})" if len(same) > 1 else "")
