"""The Sphinx directive `schedule`: builds, simulates and draws a schedule.

````
```{schedule} zb-v
:alt: a description of the picture
```
````

The options:

* `alt`: the text alternative, which every picture must have.
* `workers`, `chunks`: 4 and 8 by default.
* `stages-per-worker`: for schedules that support several.
* `above`: another schedule of the same size and costs, drawn above on the same time axis.
* `costs`: arguments of `Costs`, such as `forward=1, transfer=0.25`. Times and memory are those of a worker's whole
share
  and are divided by its stages; transfers are not. By default a forward takes 1 and a backward 2, in halves of 1.
* `recompute`: the number of checkpointed micro-batches; the schedule above has none.
* `colors`: `action` or `worker`.
* `update`: draw the optimizer's step, too.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import pipework.schedule
from pipework.cli.arguments import written_costs
from pipework.schedule import Costs, Simulation, build, simulate, svg, with_recompute


class SchedulePicture(SphinxDirective):
    """A figure with the picture and a caption of its measures."""

    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {
        "alt": directives.unchanged,
        "workers": directives.positive_int,
        "chunks": directives.positive_int,
        "stages-per-worker": directives.positive_int,
        "above": directives.unchanged,
        "costs": directives.unchanged,
        "recompute": directives.nonnegative_int,
        "colors": directives.unchanged,
        "update": directives.flag,
    }

    def run(self) -> list[nodes.Node]:
        """Draw the picture and return the figure."""
        if not self.options.get("alt"):
            raise self.error("the picture of a schedule has no text alternative: describe it in :alt:")
        try:
            below = self.simulated(self.arguments[0], self.options.get("stages-per-worker"), **self.options)
            results = [self.simulated(self.options["above"]), below] if "above" in self.options else [below]
            lines = [result.timeline for result in results]
            picture = svg(lines, colors=self.options.get("colors", "action"), update="update" in self.options)
        except (TypeError, ValueError) as error:
            raise self.error(f"no picture of this schedule: {error}") from error
        # Pages are built again if the code that draws them changes.
        for module in Path(pipework.schedule.__file__).parent.rglob("*.py"):
            self.env.note_dependency(str(module))
        width = re.search(r'width="([\d.]+)"', picture)
        assert width
        # With a width, Sphinx makes the picture a link to itself, where it is not scaled and its cells have tooltips.
        image = nodes.image(uri=self.written(picture), alt=self.options["alt"], width=f"{width[1]}px")
        return [nodes.figure("", image, nodes.caption("", caption(results)))]

    def simulated(
        self, name: str, stages_per_worker: int | None = None, *, recompute: int = 0, **_: object
    ) -> Simulation:
        """Simulate a schedule with the workers, micro-batches and costs of this picture."""
        written = self.options.get("costs")
        share = written_costs(written) if written else Costs()
        schedule = build(
            name,
            workers=self.options.get("workers", 4),
            chunks=self.options.get("chunks", 8),
            stages_per_worker=stages_per_worker,
            costs=share.placed,
        )
        costs = share.placed(schedule.placement)
        if recompute:
            schedule = replace(with_recompute(schedule, recompute), name=f"{schedule.name} with recomputation")
        return simulate(schedule, costs)

    def written(self, picture: str) -> str:
        """Write the picture into Sphinx's doctree folder, and return its path relative to the page.

        Sphinx copies it from there to the images of the site.
        """
        name = f"schedule-{sha256(picture.encode()).hexdigest()[:16]}.svg"
        file = Path(self.env.doctreedir, "schedules", name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(picture, encoding="utf-8")
        return Path(os.path.relpath(file, Path(self.env.doc2path(self.env.docname)).parent)).as_posix()


def caption(results: list[Simulation]) -> str:
    """Names and measures of the schedules, as text."""
    sentences = []
    for result in results:
        memory = max(result.peak_memory)
        facts = [f"makespan {result.makespan:g}", f"bubble {result.bubble:.1%}", f"peak memory {memory:g}"]
        if result.span < result.makespan:
            facts.insert(2, f"{result.span_bubble:.1%} of the span {result.span:g}")
        sentences.append(f"{result.schedule.name}: {', '.join(facts)}.")
    return " ".join([f"Above, {sentences[0]} Below, {sentences[1]}"] if len(sentences) > 1 else sentences)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive; Sphinx calls this function."""
    app.add_directive("schedule", SchedulePicture)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
