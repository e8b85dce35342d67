"""Measurement of the pictures of one file in a worker process."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from streamvid.sharder.source.media import Media
from streamvid.sharder.source.spool import opened
from streamvid.sharder.units.probe_unit import Finding, attempt
from streamvid.sharder.work.worker import clock_paused
from streamvid.video.limits import Limits

if TYPE_CHECKING:
    from streamvid.video.container import Source
    from streamvid.video.packets import PacketTable
    from streamvid.video.survey.frames import FrameView

Span: TypeAlias = tuple[int, int]
"""Frames of a video: (number of the first frame, number of the frame after the last)."""


@dataclass(frozen=True, slots=True)
class CurateUnit:
    """Unit of work that measures the spans of a file in one decode pass.

    spans: parts of the file, which may overlap.
    figures: names of the figures to compute.
    scene_cuts: True to divide each span at its hard cuts.
    folder: directory for temporary copies of remote files; None for the system's temporary directory.
    """

    media: Media
    spans: tuple[Span, ...]
    figures: tuple[str, ...]
    scene_cuts: bool
    limits: Limits
    folder: Path | None


def curate_file(unit: CurateUnit) -> Finding:
    """Measure one file. Runs in a worker.

    The finding has one part per span: the list of the span's scenes. Each scene is a list with three items: the number
    of its first frame, the number of the frame after its last frame, and its figures by name. A span has several scenes
    only if it is divided at hard cuts. The part for a span does not depend on the other spans.

    Raises SourceError if the file has changed since it was listed, and StorageError if the store fails.
    """
    unit.media.check_unchanged()
    with opened(unit.media, unit.folder, clock_paused) as source:
        return attempt("measuring", unit.media.source, lambda: _curate(unit, source))


def _curate(unit: CurateUnit, source: Source) -> Finding:
    from streamvid.video.survey.frames import survey

    seen = survey(source, lambda table: _numbers(unit, table), lambda table: _Seen(unit, table), unit.limits)
    return {"parts": [{"scenes": seen.scenes(*span)} for span in unit.spans]}


def _numbers(unit: CurateUnit, table: PacketTable) -> list[int]:
    """Return the numbers of the frames to decode: all frames in the spans if `scene_cuts` is set, else the samples."""
    if unit.scene_cuts:
        return sorted({number for span in unit.spans for number in range(*span)})
    return sorted(_samples(unit, table)) or [0]


def _samples(unit: CurateUnit, table: PacketTable) -> dict[int, int]:
    """Return the samples of all spans; see `sample_steps`."""
    from streamvid.sharder.curation.figures import sample_steps

    steps = sample_steps(table.timestamps, table.time_base)
    wanted = {number for span in unit.spans for number in range(*span) if number in steps}
    return {number: steps[number] for number in wanted}


class _Seen:
    """Observer that computes a file's figures and hard cuts from its frames."""

    def __init__(self, unit: CurateUnit, table: PacketTable) -> None:
        from streamvid.sharder.curation.figures import FIGURES
        from streamvid.sharder.curation.scenes import CutDetector

        self._steps = _samples(unit, table)
        self._figures = {name: FIGURES[name]() for name in unit.figures}
        self._detector = CutDetector() if unit.scene_cuts else None

    def see(self, frame: FrameView) -> None:
        if self._detector is not None:
            self._detector.see(frame)
        if frame.number in self._steps:
            for figure in self._figures.values():
                figure.see(frame, self._steps[frame.number])

    def scenes(self, start: int, stop: int) -> list[Any]:
        """Return the scenes of a span with their figures."""
        cuts = [] if self._detector is None else self._detector.cuts(start, stop)
        numbers = sorted(self._steps)
        found = []
        for first, end in pairwise([start, *cuts, stop]):
            samples = bisect_left(numbers, first), bisect_left(numbers, end)
            found.append([first, end, {name: figure.value(*samples) for name, figure in self._figures.items()}])
        return found
