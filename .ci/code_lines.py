"""Counts code lines, without docstrings, comments and blank lines, and fails where a folder has more than its cap."""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
# What a folder of the package may have. A feature pays for its lines: whoever raises a cap says why in the commit.
PACKAGE = {
    "": 2_160,
    "assignment": 516,
    "autograd": 1_346,
    "cli": 400,
    "compat": 500,
    "device_check": 270,
    "distributed": 3_276,
    "integrations": 919,
    "model": 3_907,
    "planning": 2_898,
    "runtime": 4_645,
    "saving": 1_193,
    "schedule": 2_994,
    "skip": 210,
    "testing": 673,
    "timeline": 265,
    "values": 693,
}
PACKAGE_LINES, PACKAGE_FILES = 26_842, 271
TEST_LINES = 39_483
DOC_WORDS = 44_691

NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(path: Path) -> int:
    """The lines of a file that hold a token other than a comment, and are no docstring's."""
    source = path.read_text()
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def main() -> int:
    """Prints each count beside its cap; the exit code is 1 if one is exceeded."""
    lines: Counter[str] = Counter()
    files = sorted((ROOT / "pipework").rglob("*.py"))
    for path in files:
        folders = path.relative_to(ROOT / "pipework").parts[:-1]
        lines[folders[0] if folders else ""] += code_lines(path)
    counts = [(f"pipework/{folder}", lines[folder], PACKAGE.get(folder, 0)) for folder in sorted(lines)]
    counts += [
        ("pipework, code lines", lines.total(), PACKAGE_LINES),
        ("pipework, files", len(files), PACKAGE_FILES),
        ("tests, code lines", sum(map(code_lines, (ROOT / "tests").rglob("*.py"))), TEST_LINES),
        ("docs, words", sum(len(page.read_text().split()) for page in (ROOT / "docs").glob("*.md")), DOC_WORDS),
    ]
    for name, count, cap in counts:
        print(f"{name:<24} {count:>6} of {cap:>6}{'  too many' if count > cap else ''}")
    return int(any(count > cap for _, count, cap in counts))


if __name__ == "__main__":
    sys.exit(main())
