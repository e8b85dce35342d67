"""Curation of all files in worker processes. Figures that describe their frames become columns of the records."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from streamvid.dataset.tabular.columns import check_count
from streamvid.dataset.tabular.rows import Rows
from streamvid.errors import Rejected, SourceError
from streamvid.host.journal import FileState, Key
from streamvid.sharder.curation.options import BAR_COLUMNS, BARS, GROUP, SIGNATURE
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.probing import Probes, Progress, file_state, rejection_of, run_missing
from streamvid.sharder.source.media import Media
from streamvid.sharder.source.records import Record, RecordSet, Rejection, Value
from streamvid.sharder.source.time_ranges import TimeRange
from streamvid.sharder.units.curate_unit import CurateUnit, Span, curate_file
from streamvid.sharder.units.probe_unit import Finding, Probe
from streamvid.sharder.windows import Timing
from streamvid.sharder.work.shared_journal import SharedJournal
from streamvid.video.cropping import NO_MARGINS

_LIMIT = "encode_timeout_seconds"  # the limit for every other decode of a whole file


def declare_columns(records: RecordSet, options: ShardOptions) -> RecordSet:
    """Return the records with the columns that curation will fill.

    Raises SourceError if the metadata already has one of them.
    """
    for name in options.curation.columns:
        if name in records.user_types:
            added_by = "dedup" if name == GROUP else "black_bars" if name in BAR_COLUMNS else "scores"
            raise SourceError(
                f"the metadata already has a column {name!r}, which curation.{added_by} would also add; rename the "
                f"column, or omit curation.{added_by} (--{added_by.replace('_', '-')})"
            )
    user_types = {**records.user_types, **options.curation.columns}
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
    """Measure the files of the records, or this task's share of them. Return the records with their figures.

    With `scene_cuts`, a record becomes one record per scene. A record whose file does not decode, or whose time range
    does not fit its video, becomes a rejection. A record that probing rejected is kept, so that its rejection reports
    the reason from probing. For the other arguments, see `probe_all`.
    Raises TasksUnfinished unless other tasks have measured the remaining files.
    """
    files = _files(records, probes)
    keys = {file.key: file for file in files.values()}
    storage = options.worker_storage

    def unit(key: Key) -> CurateUnit:
        file = keys[key]
        path, num_bytes, version = file.state
        media = Media(path, file.source, num_bytes, version, storage)
        rules = (options.curation.figures, options.curation.scene_cuts)
        return CurateUnit(media, tuple(file.spans), *rules, options.limits, folder)

    paths = {key: file.state[0] for key, file in keys.items()}
    share = options.work.share
    run_missing("curate", "measuring", curate_file, paths, unit, options, _LIMIT, journal, share, held_fd, progress)
    rejections = list(records.rejections)

    def curated() -> Iterator[Record]:
        for record in records.records:
            try:
                yield from _curated(record, probes, files, journal.findings)
            except Rejected as error:
                rejections.append(Rejection(record.row, record.source, str(error), error.kind))

    return replace(records, records=Rows.of(Record, curated()), rejections=tuple(rejections))


@dataclass
class _File:
    """File with the spans of its records.

    spans: span → index of its result in the finding.
    """

    state: FileState
    source: str
    spans: dict[Span, int] = field(default_factory=dict)

    def add(self, span: Span) -> None:
        self.spans.setdefault(span, len(self.spans))

    @property
    def key(self) -> Key:
        """Key of the file's finding."""
        return (*self.state, hashlib.sha256(repr([*self.spans]).encode()).hexdigest()[:16])


def _files(records: RecordSet, probes: Probes) -> dict[FileState, _File]:
    """Return the files that must be decoded."""
    files: dict[FileState, _File] = {}
    for record in records.records:
        probe = probes(record)
        if isinstance(probe, Probe):
            with suppress(Rejected):  # the record will be rejected for this reason
                span = _span(record, probe)
                state = file_state(record)
                files.setdefault(state, _File(state, record.source)).add(span)
    return files


def _span(record: Record, probe: Probe) -> Span:
    """Return the frames of a record. Raises Rejected if its time range does not fit the video."""
    if record.time_range is None or probe.is_image:
        return 0, probe.num_frames
    frames = Timing.from_text(probe.timing).frames_in(record.time_range)
    return frames.start, frames.stop


def _curated(
    record: Record, probes: Probes, files: Mapping[FileState, _File], findings: Mapping[Key, Finding]
) -> Iterator[Record]:
    """Yield the record with its figures, or one record per scene. Raises Rejected if its file could not be measured."""
    probe = probes(record)
    if isinstance(probe, Rejected):
        yield record
        return
    span, file = _span(record, probe), files[file_state(record)]
    finding = findings[file.key]
    if (rejection := rejection_of(finding, record.path, record.source)) is not None:
        raise rejection
    parts = finding["spans"][file.spans[span]]
    timing = Timing.from_text(probe.timing) if len(parts) > 1 else None
    for start, stop, figures in parts:
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
    """Return the columns that hold these figures. If black bars could not be measured, their sizes are 0."""
    found = {name: value for name, value in figures.items() if name not in (BARS, SIGNATURE)}
    if BARS in figures:
        found |= zip(BAR_COLUMNS, figures[BARS] or NO_MARGINS, strict=True)
    return found


def _time_range(timing: Timing, start: int, stop: int) -> TimeRange:
    """Return the time range that contains the frames from `start` up to, but not including, frame `stop`."""
    begin = (timing.timestamps[start] - timing.timestamps[0]) * timing.time_base
    return TimeRange(begin, begin + timing.seconds(start, stop))
