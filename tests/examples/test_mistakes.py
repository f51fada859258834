"""Examples: a mistake costs one line and status 2, and leaves no file."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

MISTAKES = [
    ("train_gpt", "--steps 0", "--steps: 0 is no whole number above 0"),
    ("train_gpt", "--width 130", "--width is 130: it must be a multiple of 4"),
    ("train_gpt", "--layers 2 --stages 5", "--stages is 5: there are only 4 layers"),
    ("train_gpt", "--layers 2 --stages 3 --schedule looped-bfs", "looped-bfs each worker has 2 of them"),
    ("train_gpt", "--schedule 2f2b", "--schedule: invalid choice: '2f2b'"),
    ("train_gpt", "--checkpoint sometimes", "sometimes"),
    ("train_gpt", "--data {folder}/missing.txt", "missing.txt: No such file or directory"),
    ("train_gpt", "--data {folder}/short.txt", "the text has 1289 bytes and needs at least 1290"),
    ("train_gpt", "--data {folder}/text.txt --out {folder}/text.txt/run", "text.txt/run: Not a directory"),
    ("train_gpt", "--data {folder}/text.txt --out {folder}/damaged", "damaged: File exists"),
    ("train_gpt", "--resume {folder}/damaged", "cannot load"),
    ("train_gpt", "--resume {folder}/other", "options.json (KeyError)"),
    ("transformer", "--epochs 0", "--epochs: 0 is no whole number above 0"),
    ("transformer", "--dropout 1", "--dropout: 1 is no number from 0 to below 1"),
    ("transformer", "--width 10", "--width is 10: it must be a multiple of 4"),
    ("transformer", "--data {folder}/empty.txt", "the text has 0 words for --batch-size 16"),
    ("transformer", "--timeline step.png", "step.png must end in .svg"),
    ("transformer", "--save {folder}/none/best.pt", "there is no folder"),
    ("transformer", "--plain --timeline step.svg", "--timeline shows the workers of a pipeline, and --plain"),
    ("transformer", "--checkpoint sometimes", "sometimes"),
    ("transformer_ddp", "--batch-size 5", "--batch-size is 5: it must be a multiple of 2, the number of"),
    ("transformer_ddp", "--data missing.txt", "missing.txt: No such file or directory"),
    ("unet", "--steps 0", "--steps: 0 is no whole number above 0"),
    ("unet", "--size 30", "--size is 30: 3 levels need a multiple of 4"),
    ("unet", "--balance 5 5", "one number for each stage is wanted, 35 layers in all"),
    ("unet", "--balance 17 18 --stages 3", "one number for each stage is wanted"),
    ("unet", "--timeline unet.png", "unet.png must end in .svg"),
    ("unet", "--checkpoint sometimes", "sometimes"),
]


@pytest.mark.parametrize(("name", "options", "told"), MISTAKES)
def test_a_mistake_costs_one_line_and_status_2(
    load: Callable[[str], ModuleType],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    options: str,
    told: str,
) -> None:
    load("transformer")  # which transformer_ddp imports
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_bytes(b"x" * 1289)
    (tmp_path / "text.txt").write_bytes(b"x" * 1290)
    for folder, content in (("damaged", b"no options"), ("other", b"{}")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "options.json").write_bytes(content)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as stopped:
        load(name).main(options.format(folder=tmp_path).split())
    out, complaint = capsys.readouterr()
    assert (stopped.value.code, out) == (2, "")
    assert complaint.count("\n") == 1
    assert told in complaint
    assert sorted(tmp_path.rglob("*")) == before
