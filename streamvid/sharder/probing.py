"""Probing of files in worker processes, which isolate crashes caused by hostile files."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import compress, repeat
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

from streamvid.cluster.share import WHOLE, Share
from streamvid.dataset.tabular.rows import Rows
from streamvid.dataset.tabular.text_set import first_numbers
from streamvid.errors import Rejected
from streamvid.host.findings import Key
from streamvid.host.journal import FileState, Journal
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.source.extra_media import MediaFile
from streamvid.sharder.source.media import Media, is_remote
from streamvid.sharder.source.records import Record
from streamvid.sharder.units.probe_unit import Finding, Probe, ProbeUnit, probe_file, rejected
from streamvid.sharder.work.pool import Crash, Pool, timed_out
from streamvid.sharder.work.shared_journal import SharedJournal
from streamvid.sharder.work.tasks import Remaining, TasksUnfinished
from streamvid.video.limits import LIMITS

Progress: TypeAlias = Callable[[str, int, int], None]
"""Callback with arguments (phase, done, total).

The phases are "records", "probe", "curate", "encode", "build" and "seal"."""

PROBE_VERSION = 10
MAX_REASON_CHARS = 500
ONLY_AUDIO = (
    "the file contains only audio, but a clip needs pictures; combine it with a picture or a video (ffmpeg -i AUDIO "
    "-i VIDEO OUT.mp4), or use it as a conditioning input for another clip (--media audio:NAME=COLUMN)"
)

Probes: TypeAlias = Callable[[Record | MediaFile], Probe | Rejected]
"""Function that returns the result of probing a file: its facts, or the reason for rejecting it."""


def note(journal: Journal, key: Key, finding: Finding) -> None:
    """Store a finding in the journal. Findings of kind "fault" or "memory" are not final: the next run may succeed."""
    journal.add(key, finding, is_final=finding.get("kind") not in ("fault", "memory"))


def rejection_of(finding: Finding, path: str, source: str) -> Rejected | None:
    """Return the rejection that a finding contains, or None if the finding is not a rejection."""
    if "rejected" not in finding:
        return None
    # A sealed dataset contains no path of this machine (SHARD-1).
    return Rejected(str(finding["rejected"]).replace(path, source)[:MAX_REASON_CHARS], kind=finding["kind"])


def run_units(
    what: str,
    handler: Callable[[Any], Finding],
    uses: Iterable[str],
    num_units: int,
    unit: Callable[[int], Any],
    options: ShardOptions,
    limit: str,
    held_fd: int,
) -> Iterator[tuple[int, Finding]]:
    """Run units of work in worker processes; yield (unit index, finding) as the units finish.

    A file that crashes the process is rejected.

    handler: module-level function that workers call with each unit.
    uses: paths and URLs that the units read or write.
    limit: name of the option that limits the time per unit.
    """
    seconds, work = getattr(options.work, limit), options.work
    limits = {"timeout_seconds": seconds, "memory_bytes": work.worker_memory_bytes}
    name = f"{handler.__module__}:{handler.__name__}"
    with Pool(name, work.workers, held_fd, opens_stores=any(map(is_remote, uses)), **limits) as pool:
        for number, answer in pool.run(num_units, unit):
            if not isinstance(answer, Crash):
                yield number, answer
            elif timed_out(answer):
                yield number, rejected(f"{what} took longer than {limit}={seconds:g}", "timeout")
            else:
                yield number, rejected(f"{what} crashed ({answer})", "crash")


class WorkFile(Protocol):
    """File that one unit of work processes. keys: keys of the file's findings."""

    @property
    def path(self) -> str: ...
    @property
    def keys(self) -> Sequence[Key]: ...


_File = TypeVar("_File", bound=WorkFile)


def run_missing(
    phase: str,
    what: str,
    handler: Callable[[Any], Finding],
    files: Sequence[_File],
    unit: Callable[[_File], Any],
    options: ShardOptions,
    limit: str,
    journal: SharedJournal,
    share: Share,
    held_fd: int,
    progress: Progress,
) -> None:
    """Run this task's units whose findings are not in the journal yet, and add the findings to the journal.

    If a file has several keys, "parts" in the finding of its unit contains one part per key, unless the finding is a
    rejection.

    files: the files of all tasks. Their order determines which task runs a unit.
    For the other arguments, see `run_units`.

    Raises TasksUnfinished if other tasks have not run their units yet.
    """

    def is_missing(file: WorkFile) -> bool:
        return any(key not in journal.findings for key in file.keys)

    own = share.of(range(len(files)))
    todo = array("q", (number for number in own if is_missing(files[number])))
    done = len(own) - len(todo)
    progress(phase, done, len(own))
    uses = (files[number].path for number in todo)
    with journal:

        def make(number: int) -> Any:
            return unit(files[todo[number]])

        for number, finding in run_units(what, handler, uses, len(todo), make, options, limit, held_fd):
            for key, part in zip(files[todo[number]].keys, finding.get("parts", repeat(finding)), strict=False):
                note(journal, key, part)
            done += 1
            progress(phase, done, len(own))
    journal.refresh()
    if num_missing := sum(map(is_missing, files)):
        raise TasksUnfinished(Remaining(phase, num_missing, len(files)))


@dataclass(frozen=True, slots=True)
class ProbedFile:
    """File to probe. source: name of the file in the dataset."""

    path: str
    num_bytes: int
    version: str
    source: str

    @property
    def keys(self) -> Sequence[Key]:
        return ((self.path, self.num_bytes, self.version),)


@dataclass(frozen=True)
class Probed:
    """Results of probing files. needs_pictures: True to reject records whose files contain only audio."""

    findings: Mapping[Key, Finding]
    files: Rows[ProbedFile]
    needs_pictures: bool = True

    def __call__(self, file: Record | MediaFile) -> Probe | Rejected:
        finding = self.findings[file_state(file)]
        facts = {name: value for name, value in finding.items() if name != "bytes_read"}
        rejection = rejection_of(finding, file.path, file.source)
        if rejection is not None:
            return rejection
        probe = Probe(**facts)
        if self.needs_pictures and probe.is_audio and isinstance(file, Record):
            return Rejected(ONLY_AUDIO, kind="not-media")
        return probe

    @property
    def bytes_read(self) -> int | None:
        """Number of bytes read from remote files in this and earlier runs, or None if no file is remote."""
        findings = (self.findings[key] for file in self.files if is_remote(file.path) for key in file.keys)
        read = [finding["bytes_read"] for finding in findings if "bytes_read" in finding]
        return sum(read) if read else None


def probe_all(
    records: Rows[Record],
    options: ShardOptions,
    journal: SharedJournal,
    held_fd: int,
    progress: Progress,
    folder: Path | None = None,
    share: Share = WHOLE,
) -> Probed:
    """Probe all files of the records, or one task's share of them.

    The numbers of workers and tasks do not affect the result.

    A file that crashes the decoder or exceeds the time or memory limit is rejected.

    folder: directory for temporary copies of remote files; None for the system's temporary directory.
    Raises TasksUnfinished unless other tasks have probed the files outside `share`.
    """
    numbers = first_numbers(file_state(file) for file in _files(records))
    is_first = numbers == np.arange(len(numbers))
    files = Rows.of(ProbedFile, compress(_files(records), is_first.tolist()))
    storage, is_verified, is_heard = options.worker_storage, _is_verified(options), _is_audio_verified(options)

    def unit(file: ProbedFile) -> ProbeUnit:
        media = Media(file.path, file.source, file.num_bytes, file.version, storage)
        return ProbeUnit(media, options.limits, is_verified, is_heard, options.needs_timing, folder)

    limit = _time_limit(options)
    run_missing("probe", "probing", probe_file, files, unit, options, limit, journal, share, held_fd, progress)
    return Probed(journal.findings, files, not options.clips.is_audio)


def _files(records: Rows[Record]) -> Iterator[ProbedFile]:
    """Yield all files that the records use."""
    for *own, extra in records.tuples("path", "num_bytes", "version", "source", "extra"):
        yield ProbedFile(*own)
        for file in extra:
            yield ProbedFile(*file_state(file), file.source)


def journal_header(options: ShardOptions) -> dict[str, object]:
    """Return the journal's header, which contains the settings that determine the findings."""
    limits = [getattr(options.work, _time_limit(options)), options.work.worker_memory_bytes]
    rules = {
        "hdr": options.hdr,
        "verify": _is_verified(options),
        "audio": _is_audio_verified(options),
        "timing": options.needs_timing,
    }
    return {"probe_version": PROBE_VERSION, "limits": asdict(LIMITS), "worker_limits": limits, **rules}


def _is_verified(options: ShardOptions) -> bool:
    # Encoding decodes every frame anyway, and rejects files that do not decode.
    return options.verify == "decode" and not options.clips.is_native


def _is_audio_verified(options: ShardOptions) -> bool:
    # Audio that is required must decode. That of native clips and of parts of files is decoded when they are made.
    if options.clips.audio == "drop":
        return False
    return _is_verified(options) or (options.clips.audio == "require" and not options.clips.is_native)


def _time_limit(options: ShardOptions) -> str:
    """Return the name of the option that limits the probing time: the encoding limit if all frames are decoded."""
    return "encode_timeout_seconds" if _is_verified(options) else "probe_timeout_seconds"


def file_state(record: Record | MediaFile | ProbedFile) -> FileState:
    """Return the path, size and version of a file, which together identify its content."""
    return (record.path, record.num_bytes, record.version)
