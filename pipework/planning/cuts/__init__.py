"""Cuts of a model's layers into the stages of a pipeline."""

from pipework.planning.cuts.best import BestCut, best_cut, best_cuts, nearest_cut
from pipework.planning.cuts.bounds import bottleneck_bound
from pipework.planning.cuts.cut import Cut, cut_at, neighbours
from pipework.planning.cuts.limits import SmallestLimit, smallest_limit
from pipework.planning.cuts.problem import CutProblem
from pipework.planning.cuts.search import Effort

__all__ = [
    "CutProblem", "Cut", "BestCut", "Effort", "SmallestLimit", "best_cut", "best_cuts", "bottleneck_bound", "cut_at",
    "nearest_cut", "neighbours", "smallest_limit",
]  # fmt: skip
