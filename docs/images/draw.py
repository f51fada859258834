"""Draws the pictures of the documentation: `PYTHONPATH=. python docs/images/draw.py`.

Timelines and memory come from the library's own schedules and simulation; `pipe.svg` and `no_pipe.svg` were drawn by
`python -m pipework draw`. Every picture has a white background, so that it is readable on light and dark pages.
"""

from dataclasses import replace
from html import escape
from itertools import pairwise
from pathlib import Path

from pipework.planning.profiles import Profile
from pipework.planning.search import plan_profile
from pipework.schedule import KINDS, Costs, Schedule, Timeline, build, simulate, svg, with_offload, with_recompute
from pipework.schedule.draw.palette import INK, LINE, PAPER, QUIET, WORKER

HERE = Path(__file__).parent
PLANNED = Path(__file__).parent / "planning_profile.json"  # of the model of planning.md, as that page makes it
GRADIENT = "#3b8a35"
VALUE = "#2f6db5"
SKIP = "#b5531c"


class Picture:
    """An SVG under construction. Coordinates are pixels, y grows downwards."""

    def __init__(self, width: float, height: float, label: str) -> None:
        self.width, self.height = width, height
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            f'role="img" aria-label="{escape(label)}" font-family="Helvetica, Arial, sans-serif" fill="{INK}">',
            f'<rect width="{width}" height="{height}" fill="{PAPER}" rx="6"/>',
            "<defs>",
            *(
                f'<marker id="{name}" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">'
                f'<path d="M0 0.5L8 4L0 7.5z" fill="{color}"/></marker>'
                for name, color in (("ink", INK), ("value", VALUE), ("gradient", GRADIENT), ("skip", SKIP))
            ),
            "</defs>",
        ]

    def box(self, x: float, y: float, w: float, h: float, fill: str = PAPER, text: str = "", size: float = 13) -> None:
        self.parts.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="5" fill="{fill}" stroke="{INK}"/>')
        if text:
            self.text(x + w / 2, y + h / 2 + size * 0.35, text, size=size)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 13,
        *,
        anchor: str = "middle",
        color: str = INK,
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{color}"{weight}>'
            f"{escape(text)}</text>"
        )

    def arrow(self, path: str, kind: str = "ink", *, dashed: bool = False) -> None:
        color = {"ink": INK, "value": VALUE, "gradient": GRADIENT, "skip": SKIP}[kind]
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.6"{dash} marker-end="url(#{kind})"/>'
        )

    def line(self, path: str, color: str = QUIET, dash: str = "") -> None:
        self.parts.append(f'<path d="{path}" fill="none" stroke="{color}" stroke-dasharray="{dash}"/>')

    def cell(self, x: float, y: float, w: float, h: float, kind: str, text: str, *, pale: bool = False) -> None:
        """An action, drawn as in the timelines."""
        look = f'fill-opacity="0.4" stroke="{PAPER}"' if pale else f'stroke="{INK}"'
        self.parts.append(f'<rect x="{x:g}" y="{y}" width="{w:g}" height="{h}" fill="{KINDS[kind].color}" {look}/>')
        self.text(x + w / 2, y + h / 2 + 4.5, text, size=12, color=QUIET if pale else INK)

    def waiting(self, x: float, y: float, w: float, h: float) -> None:
        """Idle time of a worker."""
        self.parts.append(
            f'<rect x="{x + 1.5:g}" y="{y + 1.5}" width="{w - 3:g}" height="{h - 3}" fill="none" stroke="{QUIET}" '
            'stroke-dasharray="2 3"/>'
        )
        if w > 50:
            self.text(x + w / 2, y + h / 2 + 4.5, "waits", size=12, color=QUIET)

    def save(self, name: str) -> None:
        (HERE / name).write_text("\n".join([*self.parts, "</svg>"]) + "\n", encoding="utf-8")


def graph_cut() -> None:
    """Your graph with a node per stage; below it, the graphs of the stages, cut from each other."""
    picture = Picture(824, 430, "One autograd node per stage outside; graphs that end at the stage boundaries inside")
    wide, apart = 186, 44
    columns = [84 + stage * (wide + apart) for stage in range(3)]
    picture.text(16, 28, "Outside: your autograd graph", size=14, anchor="start", bold=True)
    picture.text(28, 148, "inputs")
    picture.arrow("M52 144H80")
    for stage, x in enumerate(columns):
        picture.box(x, 48, wide, 32, WORKER[stage], f"parameters of stage {stage}")
        picture.arrow(f"M{x + wide / 2} 80V120")
        picture.box(x, 124, wide, 40, WORKER[stage], f"node of stage {stage}")
        if stage < 2:
            picture.arrow(f"M{x + wide} 144h{apart - 4}")
            picture.text(x + wide + apart / 2, 134, "token", size=11, color=QUIET)
    picture.arrow(f"M{x + wide} 144h32")
    picture.text(x + wide + 62, 141, "outputs,")
    picture.text(x + wide + 62, 157, "loss")

    picture.line("M16 200H808", dash="6 5")
    picture.text(16, 228, "Inside: cut at the boundaries", size=14, anchor="start", bold=True)
    picture.text(42, 274, "micro-", size=12)
    picture.text(42, 287, "batch", size=12)
    for stage, x in enumerate(columns):
        picture.box(x, 246, wide, 160, WORKER[stage])
        picture.text(x + wide / 2, 264, f"worker {stage}", size=12, color=QUIET)
        for left, width, text in ((9, 34, "leaf"), (70, 50, "layers"), (wide - 39, 30, "y")):
            picture.box(x + left, 276, width, 30, text=text)
        picture.arrow(f"M{x + 43} 291h25")
        picture.arrow(f"M{x + 120} 291h25")
        picture.arrow(f"M{x + wide - 24} 326H{x + 26}", "gradient")
        picture.text(x + wide / 2, 342, "its own backward", size=11, color=GRADIENT)
        picture.box(x + 7, 354, wide - 14, 42)
        picture.text(x + wide / 2, 371, "gradient buffers:", size=12)
        picture.text(x + wide / 2, 388, "micro-batch 0 + 1 + 2 + …", size=12)
        # From the buffers up to the node.
        picture.arrow(f"M{x + wide - 7} 375H{x + wide + 10}V174H{x + wide - 16}V168", "gradient", dashed=True)
        if stage < 2:
            picture.line(f"M{x + wide + 25} 277l8 -12m-14 12l8 -12", INK)
            picture.text(x + wide + 28, 260, "cut", size=12)
    picture.arrow("M58 291H92", "value")
    for x in columns[:2]:
        picture.arrow(f"M{x + wide - 9} 286h{apart + 17}", "value")
        picture.arrow(f"M{x + wide + apart + 9} 298h{-apart - 15}", "gradient")
    for number, text in enumerate(("handed to", "autograd", "once per", "mini-batch")):
        picture.text(x + 2 * wide + apart + 16, 288 + 16 * number, text, size=12, color=GRADIENT, anchor="start")
    picture.save("graph_cut.svg")


def skip() -> None:
    """A skip connection from the first stage to the last, past the one between."""
    picture = Picture(772, 270, "A skip connection goes straight from the stage that stashes to the stage that pops")
    columns = (16, 276, 536)
    layers = (("stash", "layer"), ("layer", "layer"), ("layer", "pop"))
    for stage, x in enumerate(columns):
        picture.box(x, 96, 220, 90, WORKER[stage])
        picture.text(x + 110, 116, f"stage {stage}", size=12, color=QUIET)
        for number, text in enumerate(layers[stage]):
            picture.box(x + 16 + 104 * number, 128, 84, 42, text=text)
        picture.arrow(f"M{x + 100} 149h18")
    for x in columns[:2]:
        picture.arrow(f"M{x + 204} 142h70", "value")
        picture.arrow(f"M{x + 276} 156h-70", "gradient")
    picture.text(256, 133, "value", size=12, color=VALUE)
    picture.text(256, 206, "gradient", size=12, color=GRADIENT)
    picture.line("M256 193V160", GRADIENT, "2 3")
    picture.arrow("M74 128V62Q74 50 86 50H670Q682 50 682 62V125", "skip")
    picture.text(386, 40, "the stashed tensor, straight to where it is popped", color=SKIP)
    picture.arrow("M682 170V222Q682 234 670 234H86Q74 234 74 222V174", "gradient")
    picture.text(386, 256, "its gradient, straight back", color=GRADIENT)
    picture.save("skip.svg")


def checkpoint() -> None:
    """The memory of the first of two workers over time in each checkpoint mode, stacked by micro-batch."""
    kept, micro_batches = 0.15, 4
    unit, left, row, tall = 30.0, 116, 196, 96
    shades = ("#d9d0ee", "#c2b4e2", "#a794d4", "#8b74c4")
    picture = Picture(772, 3 * row + 74, "Memory of activations over time for never, except_last and always")
    for index, (mode, count) in enumerate((("never", 0), ("except_last", 3), ("always", 4))):
        schedule = with_recompute(build("gpipe", workers=2, chunks=micro_batches), count)
        result = simulate(schedule, Costs(checkpoint_activation=kept), loss_outside=True)
        line = result.timeline
        top = 20 + index * row
        picture.text(20, top + 16, f"'{mode}'", size=15, anchor="start", bold=True)
        picture.text(20, top + 44, "worker 0", size=12, anchor="start", color=QUIET)
        picture.text(20, top + 34 + tall, "held by", size=12, anchor="start", color=QUIET)
        picture.text(20, top + 50 + tall, "autograd", size=12, anchor="start", color=QUIET)
        base = top + 60 + tall
        intervals = line.by_worker[0]
        begin = {(each.action.kind, each.action.micro_batch): each.start for each in intervals}
        end = {(each.action.kind, each.action.micro_batch): each.end for each in intervals}
        for each in intervals:
            x, width = left + each.start * unit, (each.end - each.start) * unit
            picture.parts.append(
                f'<rect x="{x}" y="{top + 26}" width="{width}" height="28" fill="{KINDS[each.action.kind].color}" '
                f'stroke="{PAPER}"/>'
            )
            picture.text(x + width / 2, top + 45, f"{each.action.kind}{each.action.micro_batch}", size=12)
        moments = sorted({0.0, *begin.values(), *end.values()})
        for start, stop in pairwise(moments):
            height = 0.0
            for micro_batch in range(micro_batches):
                filled = begin.get(("R", micro_batch), begin["F", micro_batch])
                if not begin["F", micro_batch] <= start < end["B", micro_batch]:
                    continue
                # A checkpointed forward, too, holds its graph until its outputs are sent.
                share = 1.0 if start >= filled or start < end["F", micro_batch] else kept
                pixels = share * tall / micro_batches
                picture.parts.append(
                    f'<rect x="{left + start * unit}" y="{base - height - pixels}" width="{(stop - start) * unit}" '
                    f'height="{pixels}" fill="{shades[micro_batch]}"/>'
                )
                height += pixels
        picture.line(f"M{left} {base}H{left + 19 * unit}")
        picture.text(left + 19 * unit + 8, base - 4, f"peak {result.peak_memory[0]:g}", size=12, anchor="start")
    base = 3 * row + 44
    for x, color, text in (
        (116, KINDS["F"].color, "F forward"),
        (216, KINDS["B"].color, "B backward"),
        (316, KINDS["R"].color, "R recompute"),
        (436, shades[0], "micro-batch 0"),
        *((564 + 48 * number, shade, f"{1 + number}") for number, shade in enumerate(shades[1:])),
    ):
        picture.parts.append(f'<rect x="{x}" y="{base}" width="14" height="14" rx="2" fill="{color}"/>')
        picture.text(x + 20, base + 11, text, size=12, anchor="start")
    picture.save("checkpoint.svg")


def split() -> None:
    """One linear operator in F, I and W; below it, when a worker runs its W."""
    picture = Picture(772, 420, "A linear operator in forward, I and W, and when a worker runs them")
    lefts = (16, 268, 520)
    heads = (
        ("F", "y = x @ w.t()"),
        ("I", "dx = dy @ w"),
        ("W", "dw = dy.t() @ x"),
    )
    for left, (kind, formula) in zip(lefts, heads, strict=True):
        picture.box(left, 14, 236, 190, WORKER[0])
        picture.cell(left + 12, 26, 26, 24, kind, kind)
        picture.text(left + 48, 43, formula, size=14, anchor="start", bold=True)
    forward, inputs, weights = lefts

    for left, first, last in ((forward, "x", "y"), (inputs, "dx", "dy")):
        picture.box(left + 12, 66, 36, 34, text=first)
        picture.box(left + 80, 66, 76, 34, text="operator")
        picture.box(left + 188, 66, 36, 34, text=last)
        picture.parts.append(f'<circle cx="{left + 206}" cy="100" r="5" fill="{SKIP}"/>')
    for left in (forward + 48, forward + 156):
        picture.arrow(f"M{left} 83h30", "value")
    for left in (inputs + 188, inputs + 80):
        picture.arrow(f"M{left} 83h-30", "gradient")
    picture.text(forward + 206, 121, "hook", size=12, color=SKIP)

    picture.box(forward + 70, 154, 96, 34, text="alias of w")
    picture.arrow(f"M{forward + 118} 154V103", "value", dashed=True)
    picture.text(forward + 110, 124, "its values,", size=12, anchor="end", color=VALUE)
    picture.text(forward + 110, 140, "no graph edge", size=12, anchor="end", color=VALUE)

    for number, text in enumerate(("autograd goes", "from y to x,", "not to w")):
        picture.text(inputs + 12, 132 + 17 * number, text, size=12, anchor="start", color=GRADIENT)
    picture.arrow(f"M{inputs + 206} 105V151", "skip")
    for number, text in enumerate(("the hook", "keeps")):
        picture.text(inputs + 198, 124 + 16 * number, text, size=12, anchor="end", color=SKIP)
    picture.box(inputs + 156, 154, 68, 34, text="x, dy")

    picture.arrow(f"M{inputs + 224} 171H{weights + 10}", "skip", dashed=True)
    picture.box(weights + 12, 154, 68, 34, text="x, dy")
    picture.arrow(f"M{weights + 46} 154V103")
    picture.box(weights + 12, 66, 212, 34, text="dy.t() @ x")
    picture.arrow(f"M{weights + 166} 100V151", "gradient")
    picture.text(weights + 174, 132, "+= dw", size=12, anchor="start", color=GRADIENT)
    picture.box(weights + 108, 154, 116, 34, text="buffer of alias")

    unit, start, worker = 31, 92, 2
    rows = {
        name: simulate(build(name, workers=4, chunks=4), Costs(forward=1, backward=2)) for name in ("1f1b", "zb-h1")
    }
    picture.text(16, 236, f"When: worker {worker} of 4, micro-batches 0 to 3", size=14, anchor="start", bold=True)
    moments = {}
    for top, (name, result) in zip((252, 338), rows.items(), strict=True):
        picture.text(start - 10, top + 19, result.timeline.title.partition(",")[0], size=13, anchor="end", color=QUIET)
        intervals = sorted(result.timeline.by_worker[worker], key=lambda each: each.action.micro_batch, reverse=True)
        for each in intervals:  # the frames of micro-batch 0 over the others
            x, width = start + each.start * unit, (each.end - each.start) * unit
            label = f"{each.action.kind}{each.action.micro_batch}"
            picture.cell(x, top, width, 28, each.action.kind, label, pale=each.action.micro_batch > 0)
            moments[name, label] = x + width / 2
        clock = 0.0
        for begin, end in [*sorted((each.start, each.end) for each in intervals), (result.makespan, result.makespan)]:
            if clock < begin:
                picture.waiting(start + clock * unit, top, (begin - clock) * unit, 28)
            clock = end
    kept, used = moments["zb-h1", "I0"], moments["zb-h1", "W0"]
    picture.arrow(f"M{kept} 336V318Q{kept} 310 {kept + 8} 310H{used - 8}Q{used} 310 {used} 318V334", "skip")
    picture.text((kept + used) / 2, 303, "x and dy are kept", size=12, color=SKIP)
    picture.line(f"M{used} 368v10", INK)
    picture.text(used, 392, "in a gap: the gradient for I3 is not there yet", size=12)
    picture.save("split.svg")


def simulated(name: str, micro_batches: int) -> Timeline:
    """Four workers, whose whole share of the model takes 1 forward and 2 backward for any number of stages."""
    schedule = build(name, workers=4, chunks=micro_batches)
    share = schedule.workers / schedule.stages
    return simulate(schedule, Costs(forward=share, backward=2 * share, activation=share)).timeline


def schedules() -> None:
    """1F1B below GPipe, on one time axis."""
    picture = svg([simulated("gpipe", 8), simulated("1f1b", 8)])
    (HERE / "schedule_1f1b.svg").write_text(picture, encoding="utf-8")


def first_schedule() -> Schedule:
    return with_recompute(build("1f1b", workers=2, chunks=8), 7)


def first_example() -> None:
    """The schedule of the first example of README.md."""
    line = simulate(first_schedule()).timeline
    picture = svg(replace(line, memory_unit="micro-batches"), colors="action")
    (HERE / "first_example.svg").write_text(picture, encoding="utf-8")


def memory() -> None:
    """How many micro-batches each worker holds over time, under fill-drain and under 1F1B."""
    left, unit, each, panel, micro_batches = 42, 12.5, 8.0, 186, 16
    colors = (VALUE, GRADIENT, SKIP, "#7a5bb5")
    picture = Picture(772, 2 * panel + 48, "Micro-batches held over time by each of four workers, GPipe and 1F1B")
    for index, name in enumerate(("gpipe", "1f1b")):
        line = simulated(name, micro_batches)
        top = 14 + index * panel
        base = top + 34 + each * micro_batches
        held = [line.peak_memory(worker) for worker in range(line.workers)]
        picture.text(16, top + 14, line.title, size=15, anchor="start", bold=True)
        for count in range(0, micro_batches + 1, 4):
            y = base - each * count
            picture.line(f"M{left} {y}H{left + 57 * unit}", LINE)
            picture.text(left - 8, y + 4, f"{count}", size=11, anchor="end", color=QUIET)
        for worker in reversed(range(line.workers)):
            path = f"M{left + unit * worker:g} {base:g}" + "".join(
                f"H{left + time * unit:g}V{base - each * amount:g}" for time, amount in line.memory_steps(worker)
            )
            picture.parts.append(f'<path d="{path}" fill="none" stroke="{colors[worker]}" stroke-width="2"/>')
        peaks = f"{held[0]:g} each" if len(set(held)) == 1 else ", ".join(f"{peak:g}" for peak in held)
        picture.text(left + 57 * unit, top + 14, f"peaks {peaks}", size=12, anchor="end", color=QUIET)
    base = 2 * panel + 30
    picture.text(16, base, "micro-batches held, over time", size=12, anchor="start", color=QUIET)
    for worker, color in enumerate(colors):
        x = 236 + 96 * worker
        picture.parts.append(f'<rect x="{x}" y="{base - 8}" width="14" height="4" fill="{color}"/>')
        picture.text(x + 20, base, f"worker {worker}", size=12, anchor="start")
    picture.save("memory.svg")


def planning() -> None:
    """A step of planning.md with an even cut and 1F1B, and below it the planned one."""
    profile = Profile.load(PLANNED)
    layers = profile.at(128).seconds["worker"]
    halves = layers[:5], layers[5:]
    costs = Costs(
        forward=[sum(layer.forward for layer in half) for half in halves],
        backward=[sum(layer.input_gradient + layer.weight_gradient for layer in half) for half in halves],
    )
    even = simulate(build("1f1b", workers=2, chunks=8), costs).timeline
    plan = plan_profile(
        profile,
        ["worker", "worker"],
        chunks=8,
        schedules=["1f1b", "zb-h1"],
        iterations=60,
        progress=lambda _: None,
    )
    in_micro_batches = replace(plan.costs, activation=1.0, checkpoint_activation=0.0, waiting=None)
    planned = replace(simulate(plan.schedule, in_micro_batches).timeline, unit="s")
    picture = svg([replace(even, unit="s"), planned], colors="action")
    (HERE / "planning.svg").write_text(picture, encoding="utf-8")


def offload() -> None:
    """A step of 1F1B, and below it the same with activations that wait in the memory of the host."""
    schedule = build("1f1b", workers=4, chunks=8)
    costs = Costs(forward=1, backward=2, offload=1, reload=1, offloaded=0.05)
    lines = [simulate(each, costs).timeline for each in (schedule, with_offload(schedule, costs))]
    named = replace(lines[1], title=f"{lines[1].title}, offload=1")
    (HERE / "offload.svg").write_text(svg([lines[0], named], colors="action"), encoding="utf-8")


if __name__ == "__main__":
    graph_cut()
    skip()
    checkpoint()
    split()
    schedules()
    first_example()
    memory()
    planning()
    offload()
