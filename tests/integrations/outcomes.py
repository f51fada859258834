"""What became of each model of a sweep, and the page that says so."""

from __future__ import annotations

import collections
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

RESULTS = {
    "exact": "loss, gradients and logits are those of the model, bit for bit",
    "last bits": "the same, but sums of some gradients round in another order",
    "random": "the model draws random numbers itself, so that two runs of it differ; all cuts of it give the same",
    "refused": "`attach` refuses it, with the sentence below",
    "not built": "no small configuration was found with which the model itself trains",
    "differs": "another result than the model's",
    "failed": "an error that is no refusal",
}
OTHER_LOSS = (
    "Of these the loss of a mini-batch is not the mean of the losses of its micro-batches, since the model computes "
    "with all rows together, such as in a batch norm; a pipe trains with the mean, as does the model itself if it gets "
    "one micro-batch after the other:"
)


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


def page(outcomes: list[Outcome], made: str, introduction: str) -> str:
    """Markdown: counts by task, and each model.

    Args:
        outcomes: of all models.
        made: with which versions.
        introduction: what was done.
    """
    present = [result for result in RESULTS if any(each.result == result for each in outcomes)]
    lines = ["# Architectures of transformers", "", *introduction.splitlines(), "", made, ""]
    lines += ["| | |", "|---|---|", *(f"| {result} | {RESULTS[result]} |" for result in present), ""]
    lines += ["| task | " + " | ".join(present) + " |", "|---" * (len(present) + 1) + "|"]
    tasks = list(dict.fromkeys(each.task for each in outcomes))
    for task in (*tasks, "all"):
        counts = collections.Counter(each.result for each in outcomes if task in (each.task, "all"))
        lines.append(f"| {task} | " + " | ".join(str(counts[result]) for result in present) + " |")
    for result in present:
        lines += ["", f"## {result.capitalize()}"]
        these = [each for each in outcomes if each.result == result]
        if result != "exact":
            lines += ["", *_HEAD, *_rows(these, outcomes, lambda each: each.note)]
            continue
        lines += _by_task(these, outcomes)
        noted = [each for each in these if each.note]
        if noted:
            lines += ["", OTHER_LOSS, "", *_HEAD, *_rows(noted, outcomes, lambda each: each.note)]
    odd = [each for each in outcomes if each.dropout not in ("", "equal")]
    if odd:
        lines += [
            "",
            "## With dropout",
            "",
            "With the default probabilities of dropout two cuts give the same, too, but for:",
            "",
            *_HEAD,
        ]
        lines += _rows(odd, outcomes, lambda each: each.dropout)
    return "\n".join(lines) + "\n"


_HEAD = ["| | |", "|---|---|"]


def _by_task(these: list[Outcome], outcomes: list[Outcome]) -> list[str]:
    lines = []
    for task in dict.fromkeys(each.task for each in these):
        names = sorted(_name(each, outcomes) for each in these if each.task == task)
        lines += ["", f"**{task}**: {', '.join(names)}."]
    return lines


def _rows(these: list[Outcome], outcomes: list[Outcome], note: collections.abc.Callable[[Outcome], str]) -> list[str]:
    """Models with the same sentence share a row."""
    rows: dict[str, list[Outcome]] = {}
    for each in these:
        rows.setdefault(_general(note(each), each.model), []).append(each)
    return [f"| {', '.join(_names(sharing, outcomes))} | {_escaped(sentence)} |" for sentence, sharing in rows.items()]


def _names(these: list[Outcome], outcomes: list[Outcome]) -> list[str]:
    """Those of a row, with the task where one occurs twice."""
    names = [_name(each, outcomes) for each in these]
    tasks = [each.task.replace(",", "") for each in these]
    return [f"{name} ({task})" if names.count(name) > 1 else name for name, task in zip(names, tasks, strict=True)]


def _general(sentence: str, model: str) -> str:
    """A sentence about a model, without its name and those of its base."""
    return sentence.replace(model, "the model")


def _name(outcome: Outcome, outcomes: list[Outcome]) -> str:
    """The class, and the model type where a class occurs under several."""
    same = {each.model_type for each in outcomes if (each.task, each.model) == (outcome.task, outcome.model)}
    return outcome.model + (f" ({outcome.model_type})" if len(same) > 1 else "")


def _escaped(text: str) -> str:
    """Text in a cell of a table."""
    return re.sub(r"([|<*`\[\]_])", r"\\\1", text)
