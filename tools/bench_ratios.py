"""Statistics of paired costs: medians with spread, ratios as geometric means, and requirements to check."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import exp, log

Costs = dict[str, list[float]]
"""Maps each method that was measured to its CPU seconds per sample, one value per repeat."""


@dataclass(frozen=True)
class Cell:
    """Measurements for one clip, size and kind of window.

    costs: CPU seconds of each method in each repeat.
    failures: maps each method without measurements to the reason.
    """

    clip: str
    source_height: int
    size: str
    num_frames: int
    stride: int
    costs: Costs
    failures: dict[str, str]

    @property
    def name(self) -> str:
        return f"{self.clip} {self.size} {self.num_frames}x{self.stride}"


@dataclass(frozen=True)
class Ratio:
    """How many times cheaper one method is than another.

    mean: geometric mean over the cells of each cell's median ratio.
    worst, worst_cell: lowest median ratio, and the cell that has it.
    low, high: geometric means in the worst and in the best repeat.
    """

    num_cells: int
    mean: float
    worst: float
    worst_cell: str
    low: float
    high: float


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean of positive numbers."""
    return exp(statistics.fmean(log(value) for value in values))


def ratio(cells: Iterable[Cell], dear: str, cheap: str) -> Ratio | None:
    """Return how many times cheaper `cheap` is than `dear` in the cells that have both, or None if no cell has both."""
    paired = {
        cell.name: [a / b for a, b in zip(cell.costs[dear], cell.costs[cheap], strict=True)]
        for cell in cells
        if cell.costs.get(dear) and cell.costs.get(cheap)
    }
    if not paired:
        return None
    medians = {name: statistics.median(ratios) for name, ratios in paired.items()}
    worst = min(medians, key=lambda name: medians[name])
    by_repeat = [geometric_mean(ratios) for ratios in zip(*paired.values(), strict=True)]
    mean = geometric_mean(medians.values())
    return Ratio(len(medians), mean, medians[worst], worst, min(by_repeat), max(by_repeat))


@dataclass(frozen=True)
class Line:
    """Requirement for a ratio.

    least: required geometric mean. An overhead such as "within 10 % of" is expressed as the ratio 1 / 1.1.
    of: function that selects the cells.
    least_worst: required ratio in the worst cell; None for no requirement.
    """

    text: str
    dear: str
    cheap: str
    least: float
    of: Callable[[Cell], bool]
    least_worst: float | None = None


def check(line: Line, cells: list[Cell]) -> dict[str, object]:
    """Return the requirement with its results. "met" is None if nothing was measured."""
    found = ratio(filter(line.of, cells), line.dear, line.cheap)
    told = {"line": line.text, "dear": line.dear, "cheap": line.cheap, "least": line.least}
    if found is None:
        return {**told, "met": None}
    met = found.mean >= line.least and (line.least_worst is None or found.worst >= line.least_worst)
    return {**told, **vars(found), "met": met}
