"""The pages' directive `schedule` draws what it is told, and says where it cannot."""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]

CONF = f"""
import sys
sys.path.insert(0, {str(ROOT / "docs")!r})
extensions = ["myst_parser", "schedule_picture"]
html_theme = "basic"
"""

# What is after the name in the directive, and what the caption then says.
DRAWN = {
    "plain": ("gpipe\n:alt: plain", "gpipe: makespan 33, bubble 27.3%, peak memory 8."),
    "size": ("1f1b\n:alt: size\n:workers: 2\n:chunks: 3", "1f1b: makespan 12, bubble 25.0%, peak memory 2."),
    "several": (
        "interleaved-1f1b\n:alt: several\n:stages-per-worker: 4",
        "interleaved-1f1b: makespan 26.25, bubble 8.6%, peak memory 4.75.",
    ),
    "above": (
        "zb-v\n:alt: above\n:above: 1f1b",
        "Above, 1f1b: makespan 33, bubble 27.3%, peak memory 4. "
        "Below, zb-v: makespan 25.5, bubble 5.9%, 0.0% of the span 24, peak memory 4.",
    ),
    # A worker's forward and backward take 4 whatever its stages are; the six transfers are not cut with the stages.
    "costs": (
        "looped-bfs\n:alt: costs\n:workers: 2\n:chunks: 1\n:costs: backward=3, transfer=0.25, activation=6",
        "looped-bfs: makespan 9.5, bubble 57.9%, peak memory 6.",
    ),
    "recompute": (
        "1f1b\n:alt: recompute\n:above: 1f1b\n:recompute: 8\n:costs: checkpoint_activation=0.1",
        "Above, 1f1b: makespan 33, bubble 27.3%, peak memory 4. "
        "Below, 1f1b with recomputation: makespan 39, bubble 23.1%, peak memory 1.3.",
    ),
    "colors": ("gpipe\n:alt: colors\n:colors: worker\n:update:", "gpipe: makespan 33, bubble 27.3%, peak memory 8."),
}
REFUSED = {
    "unknown": ("no-such\n:alt: x", "no schedule is called 'no-such'"),
    "no_alt": ("1f1b", "no text alternative: describe it in :alt:"),
    "cost": ("1f1b\n:alt: x\n:costs: speed=1", "no cost is called 'speed': choose one of 'F', 'B', "),
    "chunks": ("zb-v\n:alt: x\n:chunks: -1", "negative or zero value"),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a site whose pages have one picture each, in line 5; and what Sphinx complained about."""
    pytest.importorskip(
        "myst_parser", reason="the documentation's own packages are not installed; `make docs` has them"
    )
    source = tmp_path_factory.mktemp("site") / "pages"
    (source / "deep").mkdir(parents=True)
    (source / "conf.py").write_text(CONF, encoding="utf-8")
    pages = {**DRAWN, **REFUSED}
    for name, (directive, _) in pages.items():
        page = f"# {name}\n\nText.\n\n```{{schedule}} {directive}\n```\n"
        (source / "deep" / f"{name}.md").write_text(page, encoding="utf-8")
    listed = "\n".join(f"deep/{name}" for name in pages)
    (source / "index.md").write_text(f"# Pages\n\n```{{toctree}}\n{listed}\n```\n", encoding="utf-8")
    before = sorted(source.rglob("*"))
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", str(source), str(source.parent / "html")]
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    assert sorted(source.rglob("*")) == before, "something was written among the pages"
    return source.parent / "html", ran.stderr


def picture(html: Path, name: str) -> ElementTree.Element:
    """The root of the only picture on a page."""
    page = ElementTree.fromstring(only_figure((html / "deep" / f"{name}.html").read_text(encoding="utf-8")))
    image = page.find(".//img")
    assert image is not None
    assert image.attrib["alt"] == name
    link = page.find("a")
    assert link is not None
    assert link.attrib["href"] == image.attrib["src"]
    return ElementTree.parse(html / "deep" / image.attrib["src"]).getroot()


def only_figure(page: str) -> str:
    assert page.count("<figure") == 1
    return page[page.index("<figure") : page.index("</figure>") + len("</figure>")]


@pytest.mark.parametrize("name", DRAWN)
def test_each_option_is_drawn(site: tuple[Path, str], name: str) -> None:
    html, complaints = site
    assert f"/{name}.md" not in complaints
    figure = ElementTree.fromstring(only_figure((html / "deep" / f"{name}.html").read_text(encoding="utf-8")))
    said = figure.find(".//figcaption//span")
    assert said is not None
    assert said.text == DRAWN[name][1]
    assert picture(html, name).tag == "{http://www.w3.org/2000/svg}svg"


def test_pictures_show_what_the_options_say(site: tuple[Path, str]) -> None:
    texts = {name: "\n".join(picture(site[0], name).itertext()) for name in DRAWN}
    assert "1f1b, 2 workers, 3 micro-batches" in texts["size"]
    assert texts["above"].index("1f1b, 4 workers") < texts["above"].index("zb-v, 4 workers")
    assert "recompute of stage 0, micro-batch 7" in texts["recompute"]
    assert ("Update" in texts["colors"], "Update" in texts["plain"]) == (True, False)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_drawn_is_reported_with_page_and_line(site: tuple[Path, str], name: str) -> None:
    lines = [line for line in site[1].splitlines() if f"deep/{name}.md" in line]
    assert len(lines) == 1, site[1]
    assert (
        lines[0].split(f"deep/{name}.md:")[1].startswith("7: " if name == "chunks" else "5: ")
    )  # MyST knows the option's own line
    assert REFUSED[name][1] in lines[0]
