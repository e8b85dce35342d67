"""Curation of all files in worker processes. Figures that describe their frames become columns of the records."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import compress, groupby, starmap
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from streamvid.dataset.tabular.columns import check_count
from streamvid.dataset.tabular.rows import Rows
from streamvid.dataset.tabular.text_set import first_numbers
from streamvid.errors import Rejected, SourceError
from streamvid.host.findings import Key
from streamvid.sharder.curation.options import BAR_COLUMNS, BARS, SIGNATURE
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.probing import ProbedFile, Probes, Progress, file_state, rejection_of, run_missing
from streamvid.sharder.source.media import Media
from streamvid.sharder.source.records import Record, RecordSet, Rejection, Value
from streamvid.sharder.source.time_ranges import TimeRange
from streamvid.sharder.units.curate_unit import CurateUnit, Span, curate_file
from streamvid.sharder.units.probe_unit import Finding, Probe
from streamvid.sharder.windows import Timing
from streamvid.sharder.work.shared_journal import SharedJournal
from streamvid.video.cropping import NO_MARGINS

Int64Array: TypeAlias = npt.NDArray[np.int64]
_LIMIT = "encode_timeout_seconds"  # the limit for every other decode of a whole file


def declare_columns(records: RecordSet, options: ShardOptions) -> RecordSet:
    """Return the records with additional columns, which curation will fill.

    Raises SourceError if the metadata already contains one of these columns.
    """
    for column in options.curation.columns:
        if column.name in records.user_types:
            raise SourceError(
                f"the metadata already has a column named {column.name!r}, which curation.{column.option} would also "
                f"add; rename the column, or omit curation.{column.option} (--{column.option.replace('_', '-')})"
            )
    added = {column.name: column.kind for column in options.curation.columns}
    user_types = {**records.user_types, **added}
    check_count(len(user_types), "the metadata, with the columns that curation adds,")
    return replace(records, user_types=user_types)


def figures_header(options: ShardOptions) -> dict[str, object]:
    """Return the journal's header, which contains the settings that determine the findings."""
    limits = [getattr(options.work, _LIMIT), options.work.worker_memory_bytes]
    return {"curation": options.curation.findings, "limits": asdict(options.limits), "worker_limits": limits}


def curate(
    records: RecordSet,
    probes: Probes,
    options: ShardOptions,
    journal: SharedJournal,
    held_fd: int,
    progress: Progress,
    folder: Path | None = None,
) -> RecordSet:
    """Measure the records' files, or this task's share of these files. Return the records with their figures.

    With `scene_cuts`, each record is replaced with one record per scene. A record whose file cannot be decoded, or
    whose time range does not fit its video, is rejected. A record that was already rejected by probing is kept,
    so that the original reason is reported. For the other arguments, see `probe_all`.
    Raises TasksUnfinished unless other tasks have measured the remaining files.
    """
    spans = _Spans.of(records, probes)
    storage = options.worker_storage
    rules = (options.curation.figures, options.curation.scene_cuts)

    def unit(file: MeasuredFile) -> CurateUnit:
        media = Media(file.path, file.source, file.num_bytes, file.version, storage)
        return CurateUnit(media, file.spans, *rules, options.limits, folder)

    files, share = spans.files(), options.work.share
    run_missing("curate", "measuring", curate_file, files, unit, options, _LIMIT, journal, share, held_fd, progress)
    rejections = list(records.rejections)

    def curated() -> Iterator[Record]:
        for record, span in zip(records.records, spans, strict=True):
            try:
                yield from _curated(record, probes(record), span, journal.findings)
            except Rejected as error:
                rejections.append(Rejection(record.row, record.source, str(error), error.kind))

    return replace(records, records=Rows.of(Record, curated()), rejections=tuple(rejections))


@dataclass(frozen=True, slots=True)
class MeasuredFile(ProbedFile):
    """File to measure, and the range of frames that each of its records uses. Each range has its own finding."""

    spans: tuple[Span, ...]

    @property
    def keys(self) -> Sequence[Key]:
        return [(self.path, self.num_bytes, self.version, *span) for span in self.spans]


@dataclass(frozen=True)
class _Spans:
    """Spans of the records, stored in 16 bytes per record. A record that is not measured has the span (0, 0)."""

    records: Rows[Record]
    starts: Int64Array
    stops: Int64Array

    @staticmethod
    def of(records: RecordSet, probes: Probes) -> _Spans:
        starts, stops = array("q"), array("q")
        for record in records.records:
            probe, span = probes(record), (0, 0)
            if isinstance(probe, Probe):
                with suppress(Rejected):  # the record will be rejected for this reason
                    span = _span(record, probe)
            starts.append(span[0])
            stops.append(span[1])
        return _Spans(records.records, np.asarray(starts), np.asarray(stops))

    def __iter__(self) -> Iterator[Span]:
        return zip(self.starts.tolist(), self.stops.tolist(), strict=True)

    def files(self) -> Rows[MeasuredFile]:
        """Return the files that must be decoded, ordered by the first record that uses each file."""
        is_measured = (self.stops > 0).tolist()
        names = ("path", "num_bytes", "version", "source")
        rows = zip(self.records.tuples(*names), self, strict=True)
        measured = ((*own, (span,)) for own, span in compress(rows, is_measured))
        files = Rows.of(MeasuredFile, starmap(MeasuredFile, measured))
        order = np.argsort(first_numbers(files.tuples(*names[:3])), kind="stable")
        groups = groupby(files.arranged(order), file_state)
        return Rows.of(MeasuredFile, (_merged(list(group)) for _, group in groups))


def _merged(files: Sequence[MeasuredFile]) -> MeasuredFile:
    """Merge several entries for the same file into a single entry with the spans of all entries."""
    return replace(files[0], spans=tuple(dict.fromkeys(span for file in files for span in file.spans)))


def _span(record: Record, probe: Probe) -> Span:
    """Return the range of frames that a record uses. Raises Rejected if its time range does not fit the video."""
    if record.time_range is None or probe.is_image:
        return 0, probe.num_frames
    frames = Timing.from_text(probe.timing).frames_in(record.time_range)
    return frames.start, frames.stop


def _curated(record: Record, probe: Probe | Rejected, span: Span, findings: Mapping[Key, Finding]) -> Iterator[Record]:
    """Yield the record with its figures, or one record per scene. Raises Rejected if the file could not be measured."""
    if isinstance(probe, Rejected):
        yield record
        return
    if not span[1]:
        _span(record, probe)  # it raises the reason for which the record was not measured
    finding = findings[(*file_state(record), *span)]
    if (rejection := rejection_of(finding, record.path, record.source)) is not None:
        raise rejection
    scenes = finding["scenes"]
    timing = Timing.from_text(probe.timing) if len(scenes) > 1 else None
    for start, stop, figures in scenes:
        time_range = record.time_range if timing is None else _time_range(timing, start, stop)
        bars = figures.get(BARS) or NO_MARGINS
        yield replace(
            record,
            columns={**record.columns, **_columns(figures)},
            time_range=time_range,
            bars=tuple(bars) if any(bars) else NO_MARGINS,
            signature=figures.get(SIGNATURE),
        )


def _columns(figures: Mapping[str, Any]) -> dict[str, Value]:
    """Return the column values for these figures. If black bars could not be measured, their sizes are 0."""
    found = {name: value for name, value in figures.items() if name not in (BARS, SIGNATURE)}
    if BARS in figures:
        found |= zip(BAR_COLUMNS, figures[BARS] or NO_MARGINS, strict=True)
    return found


def _time_range(timing: Timing, start: int, stop: int) -> TimeRange:
    """Return the time range that contains frames `start` to `stop` (exclusive)."""
    begin = (timing.timestamps[start] - timing.timestamps[0]) * timing.time_base
    return TimeRange(begin, begin + timing.seconds(start, stop))
