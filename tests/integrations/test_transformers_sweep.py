"""Models of auto classes with configurations made tiny by rule; `sweep.py` also writes a table of them."""

import re
from collections import Counter
from pathlib import Path

import pytest
import transformers

from tests.integrations.building import TASKS, classes
from tests.integrations.sweep import imported_once, in_process

RIGHT = {"exact", "last bits", "random", "refused", "not built"}
ALL = [(task, *each) for task in TASKS for each in classes(task)]
# Their layers differ in kind: experts and windows, states, convolutions, and what a layer gets beside its input.
SAMPLE = {
    "GptOssForCausalLM", "MambaForCausalLM", "DebertaV2ForSequenceClassification", "WhisperForConditionalGeneration",
    "ConvNextForImageClassification",
}  # fmt: skip
PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"


def rows_of(text: str) -> list[list[str]]:
    """The cells of the rows of all tables."""
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:2] == "| "]


def test_the_page_counts_the_rows_of_the_table_and_no_model_differs() -> None:
    text = PAGE.read_text()
    models = [line.split(",") for line in PAGE.with_suffix(".csv").read_text().splitlines()[1:]]
    counts, *sections = re.split(r"^## ", text.partition("| task |")[2], flags=re.MULTILINE)
    heads, *by_task = rows_of("| task |" + counts)
    for task, *numbers in by_task:
        found = Counter(result for _, of, result in models if task in ("all", of) or task.replace(",", "") == of)
        assert dict(zip(heads[1:], map(int, numbers), strict=True)) == {head: found[head] for head in heads[1:]}
    assert {result for *_, result in models} <= RIGHT
    assert len(models) == len(ALL) or transformers.__version__ not in text
    for section in sections:
        title, _, body = section.partition("\n")
        if title.lower() in heads:
            named = {name for each in re.findall("^- .*: (.*)$", body, re.MULTILINE) for name in each.split(", ")}
            assert named == {name for name, _, result in models if result == title.lower()}


@pytest.mark.thorough
@pytest.mark.parametrize(("task", "model_type", "name"), [each for each in ALL if each[2] in SAMPLE])
def test_some_models_train_exactly(task: str, model_type: str, name: str) -> None:
    imported_once()
    outcome = in_process(task, model_type, name, limit=90)
    assert outcome.result in ("exact", "last bits"), outcome


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("task", "model_type", "name"), ALL)
def test_all_models_train_exactly_or_are_refused(task: str, model_type: str, name: str) -> None:
    outcome = in_process(task, model_type, name, limit=300)
    assert outcome.result in RIGHT, outcome
