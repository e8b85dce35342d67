"""Figures out of paired costs: medians with spread, ratios as geometric means, and lines to hold them against."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import exp, log

Costs = dict[str, list[float]]
"""Method → CPU seconds a sample, one a repeat. Methods that a clip has no figures of are not there."""


@dataclass(frozen=True)
class Cell:
    """One clip, one size and one kind of window: what each method cost in each repeat; why methods are missing."""

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
    """How many times cheaper: geometric mean over cells of the medians of paired repeats; worst cell; spread.

    low, high: the geometric mean in the worst and the best repeat.
    """

    num_cells: int
    mean: float
    worst: float
    worst_cell: str
    low: float
    high: float


def geometric_mean(values: Iterable[float]) -> float:
    """Of positive numbers."""
    return exp(statistics.fmean(log(value) for value in values))


def ratio(cells: Iterable[Cell], dear: str, cheap: str) -> Ratio | None:
    """How many times cheaper `cheap` is than `dear`, over the cells that have both; None if none has."""
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
    """What a ratio has to be: a least geometric mean, a least worst cell (None: any), over cells that `of` takes.

    As an overhead ("within 10 % of") it is told upside down: 1 / 1.1 is the least ratio.
    """

    text: str
    dear: str
    cheap: str
    least: float
    of: Callable[[Cell], bool]
    least_worst: float | None = None


def check(line: Line, cells: list[Cell]) -> dict[str, object]:
    """The line with its figures, "met": True, False, or None where nothing was measured."""
    found = ratio(filter(line.of, cells), line.dear, line.cheap)
    told = {"line": line.text, "dear": line.dear, "cheap": line.cheap, "least": line.least}
    if found is None:
        return {**told, "met": None}
    met = found.mean >= line.least and (line.least_worst is None or found.worst >= line.least_worst)
    return {**told, **vars(found), "met": met}
