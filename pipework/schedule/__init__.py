"""Schedules: the order of actions of each worker, as data, which can be checked, simulated and drawn without torch."""

from pipework.schedule.action import Action
from pipework.schedule.analysis.bounds import lower_bound
from pipework.schedule.analysis.channels import Channel
from pipework.schedule.analysis.compare import Comparison, compare
from pipework.schedule.analysis.rules import Violation
from pipework.schedule.analysis.simulate import Measures, Simulation, measure, simulate
from pipework.schedule.analysis.validate import ScheduleError, Validation, ValidationOptions, check, validate
from pipework.schedule.costs import Costs, StageCosts
from pipework.schedule.draw.grid import grid
from pipework.schedule.draw.svg import svg
from pipework.schedule.formats import from_csv, from_json, to_csv, to_json
from pipework.schedule.generators.controllable_memory import v_half, v_min
from pipework.schedule.generators.dualpipe_v import dualpipe_v
from pipework.schedule.generators.fill_drain import fill_drain, forward_only, looped_bfs
from pipework.schedule.generators.hanayo import hanayo
from pipework.schedule.generators.one_forward_one_backward import (
    eager_1f1b,
    interleaved_1f1b,
    one_forward_one_backward,
)
from pipework.schedule.generators.zero_bubble import interleaved_zb, zb_h1, zb_h2, zb_v
from pipework.schedule.kinds import KINDS, ActionKind, Kinds
from pipework.schedule.list_schedule import list_schedule
from pipework.schedule.passes.communication import with_communication, with_gradient_reduction, with_skips
from pipework.schedule.passes.offload import with_offload
from pipework.schedule.passes.recompute import (
    spread_evenly,
    with_recompute,
    without_recompute,
)
from pipework.schedule.passes.sharding import with_sharding
from pipework.schedule.placement import loop_placement, wave_placement
from pipework.schedule.registry import SCHEDULES, ScheduleSpec, build, schedule_spec
from pipework.schedule.schedule import Schedule, restricted
from pipework.schedule.timeline import Interval, Timeline

# What a schedule is; named schedules; passes; what a schedule needs and costs; pictures and files.
__all__ = ["KINDS", "Action", "ActionKind", "Kinds", "Schedule", "loop_placement", "wave_placement"]
__all__ += ["SCHEDULES", "ScheduleSpec", "build", "list_schedule", "restricted", "schedule_spec"]
__all__ += ["fill_drain", "forward_only", "looped_bfs", "one_forward_one_backward", "eager_1f1b", "interleaved_1f1b"]
__all__ += ["zb_h1", "zb_h2", "interleaved_zb", "zb_v", "v_half", "v_min", "dualpipe_v", "hanayo"]
__all__ += ["spread_evenly", "with_recompute", "without_recompute", "with_offload", "with_sharding"]
__all__ += ["with_communication", "with_gradient_reduction", "with_skips"]
__all__ += ["ScheduleError", "Validation", "ValidationOptions", "Violation", "check", "validate", "Channel"]
__all__ += ["Comparison", "Costs", "Measures", "Simulation", "StageCosts", "compare", "lower_bound"]
__all__ += ["Interval", "Timeline", "measure", "simulate", "grid", "svg", "from_csv", "from_json", "to_csv", "to_json"]
