"""Models of the auto classes of transformers and of diffusers, made tiny by rule; `sweep.py` writes a table of them."""

import random

import pytest

from tests.integrations.building import TASKS
from tests.integrations.sweep import PAGE, RESULTS, counts_of, everything, imported_once, row_of, rows_of

ROWS = rows_of(PAGE.with_suffix(".csv"))
TRAINED = {"exact", "last bits", "batch norm"}
RIGHT = TRAINED | {"random", "refused", "not built"}
# A seeded choice of rows: so CI notices a table that is no longer true. What is not built may be a matter of time.
SAMPLE = random.Random(0).sample(sorted(k for k in ROWS if k[0] in TASKS and ROWS[k].result in ("exact", "refused")), 4)
SAMPLE.append(random.Random(0).choice(sorted(key for key in ROWS if key[0] == "diffusers")))


def test_the_page_counts_the_rows_of_the_table() -> None:
    assert PAGE.read_text().endswith(counts_of(ROWS.values()))
    assert {row.result for row in ROWS.values()} <= {*RESULTS}
    for row in ROWS.values():
        assert bool(row.lines) == (row.result in TRAINED), row
        assert row.note or row.result == "exact", row


@pytest.mark.thorough
@pytest.mark.parametrize("key", SAMPLE, ids="-".join)
def test_some_rows_of_the_table_are_true(key: tuple[str, str]) -> None:
    if key[0] == "diffusers":
        pytest.importorskip("diffusers")
    imported_once()
    outcome, row = row_of(*key, limit=90), ROWS[key]
    assert (outcome.result, outcome.lines) == (row.result, row.lines), outcome


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("key", everything(), ids="-".join)
def test_all_models_train_exactly_or_are_refused(key: tuple[str, str]) -> None:
    outcome = row_of(*key, limit=300)
    assert outcome.result in RIGHT, outcome
