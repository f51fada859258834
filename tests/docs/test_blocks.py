"""The code blocks of the documentation run, in order, and give the output that is shown below them.

* A `python` block is run; the blocks of a page share their names. A `text` block right below is what it prints, or the
  error that it raises if it begins with "Traceback". What a block prints must be shown. `...` stands for anything;
  after the comment `<!-- numbers vary -->` the numbers are those of one run and are not compared.
* A `python` block that begins with a comment like `# train.py` is a script: it is written to that file, not run.
* A `sh` block: commands of `python -m pipework` and `python -m pipework.compat` are run, and so are the page's scripts,
  with torchrun's ranks too; targets of make and other scripts must exist.
"""

import contextlib
import doctest
import io
import re
import shlex
import traceback
from pathlib import Path

import pytest
import torch

from tests.programs import RunPython

sybil = pytest.importorskip("sybil")
markdown = pytest.importorskip("sybil.parsers.markdown")

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("**/*.md")),
    *sorted((ROOT / "benchmarks").glob("**/*.md")),
]
QUICK = {ROOT / "docs" / "quickstart.md"}
OUTPUT = re.compile(r"\s*(?P<varies><!-- numbers vary -->\s*)?```text\n(?P<text>.*?)^```", re.DOTALL | re.MULTILINE)
SCRIPT = re.compile(r"# (?P<file>\w+\.py)\n")
NUMBER = re.compile(r"\d+([.,]\d+)*")
TRACEBACK = "Traceback (most recent call last):\n"


def shown_below(example: sybil.Example) -> re.Match[str] | None:
    """The output that the page shows right below a block."""
    return OUTPUT.match(example.document.text, example.region.end)


def compare(got: str, shown: re.Match[str] | None) -> None:
    want = shown["text"] if shown else ""
    if shown and shown["varies"]:
        got, want = (re.sub(r"\s+", " ", NUMBER.sub("0", text)) for text in (got, want))
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.OutputChecker().check_output(want, got, options), f"shown:\n{want}\nbut it is:\n{got}"


class Python(markdown.CodeBlockParser):
    language = "python"

    def evaluate(self, example: sybil.Example) -> None:
        if script := SCRIPT.match(example.parsed):
            Path(script["file"]).write_text(example.parsed, encoding="utf-8")
            return
        shown = shown_below(example)
        padding = "\n" * (example.line + example.parsed.line_offset)  # tracebacks then name the page's own line
        code = compile(padding + example.parsed, example.path, "exec", dont_inherit=True)
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(code, example.namespace)
        except Exception as error:
            if shown is None or not shown["text"].startswith(TRACEBACK):
                raise
            printed.write(TRACEBACK + "  ...\n" + "".join(traceback.format_exception_only(error)))
        compare(printed.getvalue(), shown)


class Shell(markdown.CodeBlockParser):
    """Runs commands.

    Args:
        run_python: as the fixture does.
        run_ranks: likewise.
    """

    language = "sh"

    def __init__(self, run_python: RunPython, run_ranks: RunPython) -> None:
        super().__init__()
        self._run_python, self._run_ranks = run_python, run_ranks

    def output_of(self, command: list[str]) -> str:
        """What a command of Python's prints, or torchrun's."""
        match command:
            case ["torchrun", "--nproc-per-node", ranks, *arguments]:
                ran = self._run_ranks(int(ranks), arguments, timeout=120)
            case _:
                ran = self._run_python(command[1:], timeout=120)
        assert ran.returncode == 0, f"{shlex.join(command)}\n{ran.stderr}"
        return ran.stdout

    def evaluate(self, example: sybil.Example) -> None:
        printed = ""
        for line in example.parsed.splitlines():
            match shlex.split(line, comments=True):
                case [] | ["pip", "install", *_] | ["python", "-m", "pip", *_]:
                    pass
                case ["make", target, *_]:
                    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
                case ["python", "-m", "pipework" | "pipework.compat", *_] as command:
                    printed += self.output_of(command)
                case ["python", "-m", module, *_] if module.startswith("benchmarks."):
                    assert (ROOT / module.replace(".", "/")).with_suffix(".py").is_file(), line
                case ["python", script, *_] as command if Path(script).is_file():  # the page has it
                    printed += self.output_of(command)
                case ["torchrun", "--nproc-per-node", _, script, *_] as command if Path(script).is_file():
                    printed += self.output_of(command)
                case ["python", script, *_] | ["torchrun", "--nproc-per-node", _, script, *_]:
                    assert (ROOT / script).is_file(), line
                case [*_, "bash", script]:
                    assert (ROOT / script).is_file(), line
                case _:
                    pytest.fail(f"nobody checks this command: {line}")
        if shown := shown_below(example):
            compare(printed, shown)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")  # PyTorch's tracer, about itself
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")  # Lightning
@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo, likewise
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if page in QUICK else pytest.mark.thorough) for page in PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_blocks_run_and_print_what_is_shown(
    run_python: RunPython, run_ranks: RunPython, page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    document = sybil.Sybil([Python(), Shell(run_python, run_ranks)]).parse(page)
    threads = torch.get_num_threads()
    try:
        for example in document.examples():
            example.evaluate()
    finally:
        torch.set_num_threads(threads)  # a page may have set them


def test_readme_shows_how_it_is_used(run_python: RunPython, run_ranks: RunPython) -> None:
    """The pattern that finds the blocks would pass an empty page, too."""
    examples = list(sybil.Sybil([Python(), Shell(run_python, run_ranks)]).parse(ROOT / "README.md").examples())
    assert [example.region.parsed.count("Pipe(") > 0 for example in examples].count(True) >= 4
    assert sum(shown_below(example) is not None for example in examples) >= 1


def test_links_to_files_lead_somewhere() -> None:
    for page in PAGES:
        prose = re.sub(r"^(```+).*?^\1", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)\s]+)\)", prose):
            path = target.partition("#")[0]
            if path and "://" not in path:
                assert (page.parent / path).exists(), f"{page} links to {target}"
