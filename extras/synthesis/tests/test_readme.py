from pathlib import Path

from tests.docs.test_blocks import Python, sybil


def test_blocks_run_and_print_what_is_shown() -> None:
    for example in sybil.Sybil([Python()]).parse(Path(__file__).parents[1] / "README.md").examples():
        example.evaluate()
