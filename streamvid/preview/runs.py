"""Training runs as the trainer writes them: metrics as curves, and generated samples."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from streamvid.errors import DatasetError
from streamvid.trainer.metrics import METRICS_FILE

MAX_POINTS = 400
"""Maximum number of points in a curve. Longer curves are averaged over groups of consecutive steps."""

_MIN_SMOOTHED = 40
_MAX_BYTES = 64 * 2**20
_SAMPLE = re.compile(r"step-(\d{1,12})\.(png|mp4)")
_CURVES = (
    ("loss", "Loss"),
    ("eval_loss", "Held-out loss"),
    ("samples_per_second", "Samples per second"),
    ("data_wait_share", "Share of time spent waiting for data"),
    ("lr", "Learning rate"),
    ("grad_norm", "Gradient norm"),
)


@dataclass(frozen=True, slots=True)
class Curve:
    """Values of one metric.

    points: (step, value) pairs in ascending order of steps.
    """

    name: str
    label: str
    points: tuple[tuple[float, float], ...]

    @property
    def last(self) -> float:
        """Most recent value."""
        return self.points[-1][1]

    @property
    def bounds(self) -> tuple[float, float, float, float]:
        """Bounds of the curve: (first step, last step, lowest value, highest value)."""
        steps, values = zip(*self.points, strict=True)
        return min(steps), max(steps), min(values), max(values)

    @property
    def is_noisy(self) -> bool:
        """True if the curve has many points and changes direction at more than a third of them."""
        changes = [after - before for (_, before), (_, after) in pairwise(self.points)]
        turns = sum(one * other < 0 for one, other in pairwise(changes))
        return len(self.points) >= _MIN_SMOOTHED and 3 * turns > len(self.points)

    @property
    def smoothed(self) -> tuple[tuple[float, float], ...]:
        """Moving average of the curve. On each side of a point, the window covers a twentieth of the curve."""
        reach, values = max(1, len(self.points) // 20), [value for _, value in self.points]
        sums = [0.0, *accumulate(values)]
        ends = [(max(0, at - reach), min(len(values), at + reach + 1)) for at in range(len(values))]
        means = [(sums[end] - sums[first]) / (end - first) for first, end in ends]
        return tuple((step, mean) for (step, _), mean in zip(self.points, means, strict=True))

    def path(self, width: float, height: float, *, is_smooth: bool = False) -> str:
        """Return the curve, or its smoothed form, as the `d` attribute of an SVG path in a box of this size."""
        first, last, low, high = self.bounds
        across, up = width / ((last - first) or 1), height / ((high - low) or 1)
        points = self.smoothed if is_smooth else self.points
        places = [f"{(step - first) * across:.1f},{height - (value - low) * up:.1f}" for step, value in points]
        return "M" + "L".join(places)


@dataclass(frozen=True, slots=True)
class RunSample:
    """Names of the files in the run's `samples` folder that contain the samples generated at one step."""

    step: int
    picture: str | None
    movie: str | None


@dataclass(frozen=True, slots=True)
class RunView:
    """A training run: its last step, its curves, and its generated samples with the latest first."""

    last_step: int | None
    curves: tuple[Curve, ...]
    samples: tuple[RunSample, ...]


def read_run(folder: Path) -> RunView:
    """Read the metrics and list the samples of a run. Lines that are not complete JSON are skipped.

    Raises DatasetError if the metrics are missing or larger than 64 MiB.
    """
    path = folder / METRICS_FILE
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise DatasetError(f"{path} is {path.stat().st_size} bytes long, but at most {_MAX_BYTES} can be shown")
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DatasetError(
            f"{path}: {error.strerror}; pass the output folder of a `streamvid train` run that has completed a step"
        ) from error
    values: dict[str, list[tuple[float, float]]] = {name: [] for name, _ in _CURVES}
    last_step: int | None = None
    for line in text.splitlines():
        found = _numbers(line)
        if "step" not in found:
            continue
        last_step = int(found["step"])
        for name, points in values.items():
            if name in found:
                points.append((found["step"], found[name]))
    curves = (Curve(name, label, _thinned(values[name])) for name, label in _CURVES if values[name])
    return RunView(last_step, tuple(curves), _samples(folder))


def _numbers(line: str) -> dict[str, float]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(value, dict):
        return {}
    return {
        name: float(one)
        for name, one in value.items()
        if isinstance(one, int | float) and not isinstance(one, bool) and abs(one) < 1e300 and math.isfinite(one)
    }


def _thinned(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    size = -(-len(points) // MAX_POINTS)
    if size == 1:
        return tuple(points)
    groups = [points[first : first + size] for first in range(0, len(points), size)]
    return tuple((group[-1][0], sum(value for _, value in group) / len(group)) for group in groups)


def _samples(folder: Path) -> tuple[RunSample, ...]:
    found: dict[int, dict[str, str]] = {}
    try:
        names = [path.name for path in (folder / "samples").iterdir()]
    except OSError:
        return ()
    for name in names:
        match = _SAMPLE.fullmatch(name)
        if match is not None:
            found.setdefault(int(match[1]), {})[match[2]] = name
    return tuple(RunSample(step, files.get("png"), files.get("mp4")) for step, files in sorted(found.items())[::-1])


def sample_file(folder: Path, name: str) -> Path | None:
    """Return the path of a generated sample, or None if no generated sample has this name.

    No other file of the run is accessible.
    """
    path = folder / "samples" / name
    is_inside = _SAMPLE.fullmatch(name) is not None and path.resolve().parent == (folder / "samples").resolve()
    return path if is_inside and path.is_file() else None
