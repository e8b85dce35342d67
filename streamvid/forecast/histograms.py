"""Histograms of a dataset's samples: durations, sizes, losses by cropping and scaling, captions and numeric columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from streamvid.dataset.arrow import numbers_of
from streamvid.dataset.filter.filter import count_matches, filter_of_view
from streamvid.dataset.index import USER_PREFIX
from streamvid.dataset.reader import Dataset
from streamvid.forecast.dataset import MAX_SCANNED_SHARDS

if TYPE_CHECKING:
    import pyarrow as pa

MAX_SCANNED_SAMPLES = 1 << 19
"""Approximate maximum number of samples to read. Their shards are spread evenly over the dataset."""

_NUM_BINS = 24
_LOG_RATIO = 1000.0  # from this ratio of maximum to minimum on, bins of equal width would leave nearly all empty

Floats: TypeAlias = npt.NDArray[np.float64]
_Measure: TypeAlias = "Callable[[pa.Table], Floats]"


@dataclass(frozen=True, slots=True)
class Histogram:
    """Distribution of one figure over the samples.

    name: index column or figure, such as "duration_seconds" or "user.motion".
    label: human-readable name, with the unit.
    edges: bin edges in ascending order, one more than the number of bins; empty if there are no values.
    counts: number of values per bin.
    num_missing: number of samples without a value.
    """

    name: str
    label: str
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    num_missing: int
    minimum: float = float("nan")
    mean: float = float("nan")
    median: float = float("nan")
    maximum: float = float("nan")

    @property
    def num_values(self) -> int:
        """Number of samples with a value."""
        return sum(self.counts)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON-serializable values. Statistics for a figure without values are null."""
        is_empty = math.isnan(self.mean)
        statistics = ("minimum", "mean", "median", "maximum")
        return {name: None if is_empty and name in statistics else value for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Histograms:
    """Histograms of a dataset.

    num_scanned: number of samples that were read.
    hours: total duration of all clips, estimated if not all samples were read.
    """

    figures: tuple[Histogram, ...]
    num_scanned: int
    num_samples: int
    hours: float

    @property
    def is_complete(self) -> bool:
        """True if every sample was read."""
        return self.num_scanned == self.num_samples

    def to_json(self) -> dict[str, Any]:
        """Return the histograms as JSON-serializable values."""
        return {
            "num_scanned": self.num_scanned,
            "num_samples": self.num_samples,
            "hours": self.hours,
            "figures": [one.to_json() for one in self.figures],
        }


@dataclass(frozen=True, slots=True)
class _Figure:
    label: str
    columns: tuple[str, ...]
    measure: _Measure


def _column(name: str, factor: float = 1.0) -> _Measure:
    return lambda table: _floats(table.column(name)) * factor


def _aspect(table: pa.Table) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return _floats(table.column("source_width")) / _floats(table.column("source_height"))


def _short_side(table: pa.Table) -> Floats:
    found: Floats = np.minimum(_floats(table.column("source_width")), _floats(table.column("source_height")))
    return found


def _caption_length(table: pa.Table) -> Floats:
    import pyarrow.compute as pc

    return _floats(pc.fill_null(pc.utf8_length(table.column("text")), 0))


_FIGURES: Mapping[str, _Figure] = {
    "duration_seconds": _Figure("Clip duration (s)", ("duration_seconds",), _column("duration_seconds")),
    "fps": _Figure("Frame rate (fps)", ("fps",), _column("fps")),
    "window_num_frames": _Figure("Frames per clip", ("window_num_frames",), _column("window_num_frames")),
    "short_side": _Figure("Short side of the source (px)", ("source_width", "source_height"), _short_side),
    "aspect": _Figure("Aspect ratio of the source", ("source_width", "source_height"), _aspect),
    "crop_fraction": _Figure("Cropped share (%)", ("crop_fraction",), _column("crop_fraction", 100.0)),
    "upscale": _Figure("Scaling factor", ("upscale",), _column("upscale")),
    "psnr_y": _Figure("PSNR-Y (dB)", ("psnr_y",), _column("psnr_y")),
    "audio_loudness_lufs": _Figure("Loudness (LUFS)", ("audio_loudness_lufs",), _column("audio_loudness_lufs")),
    "audio_start_seconds": _Figure("Start of the audio (s)", ("audio_start_seconds",), _column("audio_start_seconds")),
    "audio_silence_share": _Figure("Silence (%)", ("audio_silence_share",), _column("audio_silence_share", 100.0)),
    "caption_length": _Figure("Caption length (characters)", ("text",), _caption_length),
    "clip_bytes": _Figure("Clip size (kB)", ("clip_bytes",), _column("clip_bytes", 0.001)),
}


def figure_labels(dataset: Dataset) -> dict[str, str]:
    """Return a mapping from name to label for all figures that `histograms_of` covers. No samples are read."""
    return {name: figure.label for name, figure in _figures(dataset).items()}


def histograms_of(dataset: Dataset, max_samples: int = MAX_SCANNED_SAMPLES) -> Histograms:
    """Read the samples index, one row group per shard, and return histograms of the samples.

    For a view, only the view's samples are read. The function reads at most about `max_samples` samples, from at most
    MAX_SCANNED_SHARDS shards that are spread evenly over the dataset.
    """
    figures, shards, chosen = _figures(dataset), dataset.shards, filter_of_view(dataset)
    counts = shards.num_samples if chosen is None else count_matches(dataset, shards, chosen)
    rows, num_samples = np.flatnonzero(counts), int(counts.sum())
    num_read = int(shards.num_samples[rows].sum())
    stride = max(1, -(-len(rows) // MAX_SCANNED_SHARDS), -(-num_read // max_samples))
    columns = {column for figure in figures.values() for column in figure.columns} & {*_names(dataset)}
    columns |= {*(chosen.columns if chosen else ())}
    values: dict[str, list[npt.NDArray[np.float32]]] = {name: [] for name in figures}
    num_scanned, seconds = 0, 0.0
    for row in rows[::stride].tolist():
        table = dataset.samples(shards[row], sorted(columns))
        if chosen is not None:
            table = table.take(chosen.matching(table))
        num_scanned += len(table)
        for name, figure in figures.items():
            found = figure.measure(table)
            values[name].append(found.astype(np.float32))
            if name == "duration_seconds":
                seconds += float(found[np.isfinite(found)].sum())
    hours = seconds / 3600 * (num_samples / num_scanned if num_scanned else 1)
    made = tuple(_histogram(name, figures[name].label, some) for name, some in values.items())
    return Histograms(made, num_scanned, num_samples, hours)


def _names(dataset: Dataset) -> list[str]:
    return list(dataset.samples_schema.names)


def _figures(dataset: Dataset) -> dict[str, _Figure]:
    own = [name for name in _names(dataset) if name.startswith(USER_PREFIX) and dataset.is_numeric(name)]
    pictured = dataset.manifest.clips != "text"
    fixed = {name: figure for name, figure in _FIGURES.items() if pictured or name == "caption_length"}
    if dataset.manifest.clips != "native":
        fixed.pop("psnr_y", None)
    known = {*_names(dataset)}
    fixed = {name: figure for name, figure in fixed.items() if known.issuperset(figure.columns)}
    return fixed | {name: _Figure(name.removeprefix(USER_PREFIX), (name,), _column(name)) for name in own}


def _floats(column: Any) -> Floats:
    """Return a column of numbers or booleans as float64, with NaN for missing values."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    wide = pc.fill_null(column.cast(pa.float64(), safe=False), float("nan"))
    return numbers_of(wide.combine_chunks() if isinstance(wide, pa.ChunkedArray) else wide)


def _histogram(name: str, label: str, parts: list[npt.NDArray[np.float32]]) -> Histogram:
    values = np.concatenate(parts) if parts else np.empty(0, np.float32)
    there = values[np.isfinite(values)]
    missing = len(values) - len(there)
    if not len(there):
        return Histogram(name, label, (), (), missing)
    edges = _edges(there)
    counts, _ = np.histogram(there, edges)
    return Histogram(
        name,
        label,
        tuple(map(float, edges)),
        tuple(map(int, counts)),
        missing,
        minimum=float(there.min()),
        mean=float(there.mean(dtype=np.float64)),
        median=float(np.median(there)),
        maximum=float(there.max()),
    )


def _edges(values: npt.NDArray[np.float32]) -> Floats:
    """Return the bin edges for a histogram of the values.

    Integers in a small range get one bin each. Other values get bins of equal width, or bins whose edges are spaced by
    a constant factor.
    """
    low, high = float(values.min()), float(values.max())
    if high - low < _NUM_BINS and not (values % 1).any():
        return np.arange(low - 0.5, high + 1)
    if low == high:
        return np.array([low, high])
    spaced = np.geomspace if low > 0 and high / low >= _LOG_RATIO else np.linspace
    edges: Floats = spaced(low, high, _NUM_BINS + 1)
    edges[0], edges[-1] = low, high  # rounding must not leave a value out
    return edges
