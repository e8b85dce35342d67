"""Probing of files in worker processes, which isolate crashes caused by hostile files."""

from __future__ import annotations

import posixpath
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from streamvid.dataset.tabular.rows import Rows
from streamvid.errors import DecodeError, ProbeError, Rejected, SourceError, StorageError, StreamvidError
from streamvid.host.journal import FileState, Journal, Key
from streamvid.host.share import WHOLE, Share
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.source.extra_media import MediaFile
from streamvid.sharder.source.media import Media, is_remote
from streamvid.sharder.source.records import Record
from streamvid.sharder.source.spool import SpooledFile, opened
from streamvid.sharder.windows import Clip, Timing, copied
from streamvid.sharder.work.pool import Crash, Pool, timed_out
from streamvid.sharder.work.shared_journal import SharedJournal
from streamvid.sharder.work.tasks import Remaining, TasksUnfinished
from streamvid.sharder.work.worker import clock_paused
from streamvid.video.limits import LIMITS, Limits

if TYPE_CHECKING:
    from streamvid.video.container import Source

Progress: TypeAlias = Callable[[str, int, int], None]
"""Callback with arguments (phase, done, total). The phases are "records", "probe", "encode", "build" and "seal"."""

PROBE_VERSION = 8
MAX_REASON_CHARS = 500
_EXTENSIONS = {
    "mov": "mp4",
    "matroska": "mkv",
    "avi": "avi",
    "mpegts": "ts",
    "mpeg": "mpg",
    "mpegvideo": "m2v",
    "flv": "flv",
    "asf": "wmv",
    "ogg": "ogv",
    "ivf": "ivf",
    "gif": "gif",
    "jpeg_pipe": "jpg",
    "png_pipe": "png",
    "webp_pipe": "webp",
    "bmp_pipe": "bmp",
    "tiff_pipe": "tif",
}
_HEIF_EXTENSIONS = {"av1": "avif"}
_EXTENSIONS_OF_NAMES = {
    **dict.fromkeys(("mp4", "m4v", "mov", "f4v", "3gp", "3g2"), "mp4"),
    "divx": "avi",
    "mts": "ts",
    "m2ts": "ts",
    "mpeg": "mpg",
    "vob": "mpg",
    "asf": "wmv",
    "jpeg": "jpg",
    "tiff": "tif",
}


@dataclass(frozen=True, slots=True)
class Probe:
    """Facts about a file that the sharder needs. width, height: display size in pixels.

    extension: extension of the tar member if the file is copied. timing: a `Timing` as text; "" if it is not needed.
    """

    width: int
    height: int
    num_frames: int
    fps: float
    duration_seconds: float
    codec: str
    extension: str
    is_image: bool
    pixel_format: str = ""
    timing: str = ""

    def copy_of(self, file: Record | MediaFile) -> Clip:
        """Return the clip that stores the file unchanged."""
        facts = (self.codec, self.num_frames, self.fps, self.duration_seconds, self.width, self.height)
        return Clip(file.path, file.num_bytes, self.extension, *facts)


Finding: TypeAlias = dict[str, Any]
"""JSON result of a worker, as the journal stores it: the fields of a Probe or Clip, or "rejected" and "kind"."""


Probes: TypeAlias = Callable[[Record | MediaFile], Probe | Rejected]
"""Function that returns the result of probing a file: its facts, or the reason for rejecting it."""


@dataclass(frozen=True, slots=True)
class ProbeUnit:
    """Task that probes one file.

    verify: True to decode every frame. timing: True to return the time of each frame.
    folder: directory for temporary copies of remote files; None for the system's temporary directory.
    """

    media: Media
    limits: Limits
    verify: bool
    timing: bool
    folder: Path | None


def probe_file(unit: ProbeUnit) -> Finding:
    """Probe one file. Runs in a worker.

    For a remote file, the finding includes "bytes_read", the number of bytes read. Raises StorageError if the store
    fails and SourceError if the file has changed since it was listed; neither error rejects the file.
    """
    with opened(unit.media, unit.folder, clock_paused) as source:
        finding = attempt("probing", unit.media.source, lambda: _probe(unit, source))
        return {**finding, "bytes_read": source.bytes_read} if isinstance(source, SpooledFile) else finding


def _probe(unit: ProbeUnit, source: Source) -> Finding:
    from streamvid.video.probe import probe

    info = probe(source, unit.limits, verify=unit.verify)
    timing = Timing.of(info).to_text() if unit.timing and not info.is_image else ""
    is_heif = info.is_image and info.container == "mov"
    extension = (
        _HEIF_EXTENSIONS.get(info.codec, "heic") if is_heif else clip_extension(info.container, unit.media.source)
    )
    return asdict(copied(Probe, info, extension=extension, timing=timing))


def attempt(what: str, name: str, work: Callable[[], Finding]) -> Finding:
    """Run `work` on the file `name`. Return a rejection if the file causes an error.

    Raises StreamvidError if the installation or streamvid caused the error, such as an incompatible library version,
    because such an error would reject every file.
    """
    try:
        return work()
    except (ProbeError, DecodeError) as error:
        return rejected(str(error), getattr(error, "kind", "") or "damaged")
    except (SourceError, StorageError):
        raise
    except OSError as error:
        return rejected(f"cannot be read: {error.strerror or error}", "unreadable-file")
    except (ImportError, AttributeError, NameError, TypeError) as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise StreamvidError(
            f"{what} {name} failed with {type(error).__name__}: {error} ({at.filename}:{at.lineno}). This is a fault "
            "of the installation or of streamvid, not of the file. Finished work is kept: repair the installation, and "
            "run the same command again"
        ) from error
    except MemoryError:
        return rejected(f"{what} needs more memory than worker_memory_bytes allows", "memory")
    except Exception as error:  # noqa: BLE001 — one bad file must not end the run, and its error is reported
        return rejected(f"{what} failed because of a bug in streamvid: {type(error).__name__}: {error}", "fault")


def note(journal: Journal, key: Key, finding: Finding) -> None:
    """Store a finding. A "fault" or "memory" finding is not final, because the next run may succeed."""
    journal.add(key, finding, is_final=finding.get("kind") not in ("fault", "memory"))


def rejected(reason: str, kind: str) -> Finding:
    """Return a finding that rejects a file."""
    return {"rejected": reason, "kind": kind}


def rejection_of(finding: Finding, path: str, source: str) -> Rejected | None:
    """Return the rejection that a finding contains, or None."""
    if "rejected" not in finding:
        return None
    # A sealed dataset contains no path of this machine (SHARD-1).
    return Rejected(str(finding["rejected"]).replace(path, source)[:MAX_REASON_CHARS], kind=finding["kind"])


def run_units(
    what: str,
    handler: str,
    uses: Sequence[str],
    num_units: int,
    unit: Callable[[int], Any],
    options: ShardOptions,
    limit: str,
    held_fd: int,
) -> Iterator[tuple[int, Finding]]:
    """Run units of work in worker processes; yield (unit index, finding) as the units finish.

    A crash becomes a rejection. uses: paths and URLs that the units read or write.
    limit: name of the option that limits the time per unit.
    """
    seconds, work = getattr(options.work, limit), options.work
    limits = {"timeout_seconds": seconds, "memory_bytes": work.worker_memory_bytes}
    with Pool(handler, work.workers, held_fd, opens_stores=any(map(is_remote, uses)), **limits) as pool:
        for number, answer in pool.run(num_units, unit):
            if not isinstance(answer, Crash):
                yield number, answer
            elif timed_out(answer):
                yield number, rejected(f"{what} took longer than {limit}={seconds:g}", "timeout")
            else:
                yield number, rejected(f"{what} crashed ({answer})", "crash")


def clip_extension(container: str, source: str) -> str:
    """Return the extension of a clip's tar member, which depends on the file's container rather than its name.

    Each family of containers has one extension, so that .mov and .MP4 files share shards. As an exception, .webm files
    keep their extension, because it implies certain codecs.
    """
    name = _EXTENSIONS.get(container)
    if name is None:
        raise ProbeError(
            f"the container {container} is not supported; use one of {', '.join(_EXTENSIONS)}", kind="codec"
        )
    return "webm" if name == "mkv" and posixpath.splitext(source)[1].lower() == ".webm" else name


@dataclass(frozen=True)
class Probed:
    """Results of probing files. states: (path, size, version) of each file. bytes_read: see `ShardReport`."""

    findings: Mapping[Key, Finding]
    states: Collection[FileState]

    def __call__(self, file: Record | MediaFile) -> Probe | Rejected:
        finding = self.findings[file_state(file)]
        facts = {name: value for name, value in finding.items() if name != "bytes_read"}
        return rejection_of(finding, file.path, file.source) or Probe(**facts)

    @property
    def bytes_read(self) -> int | None:
        """Number of bytes read from remote files in this and earlier runs; None if no file is remote."""
        findings = (self.findings[state] for state in self.states)
        read = [finding["bytes_read"] for finding in findings if "bytes_read" in finding]
        return sum(read) if read else None


def extension_of_name(suffix: str) -> str:
    """Return the extension that a clip's tar member usually has if its file's name ends in `suffix`."""
    return _EXTENSIONS_OF_NAMES.get(suffix, suffix)


def probe_all(
    records: Rows[Record],
    options: ShardOptions,
    journal: SharedJournal,
    held_fd: int,
    progress: Progress,
    folder: Path | None = None,
    share: Share = WHOLE,
) -> Probed:
    """Probe all files of the records, or a share of them. The result does not depend on the number of workers or tasks.

    Raises TasksUnfinished unless other tasks have probed the files outside of `share`.

    folder: directory for temporary copies of remote files; None for the system's temporary directory. A file that
    crashes the decoder or exceeds the limits on time and memory is rejected.
    """
    sources: dict[FileState, str] = {}  # names of the files
    for path, num_bytes, version, source, extra in records.tuples("path", "num_bytes", "version", "source", "extra"):
        sources[path, num_bytes, version] = source
        sources.update((file_state(file), file.source) for file in extra)
    own = share.of(list(sources))
    states = [state for state in own if state not in journal.findings]
    done = len(own) - len(states)
    progress("probe", done, len(own))
    storage, is_verified = options.worker_storage, _is_verified(options)

    def unit(number: int) -> ProbeUnit:
        path, num_bytes, version = state = states[number]
        media = Media(path, sources[state], num_bytes, version, storage)
        return ProbeUnit(media, options.limits, is_verified, options.needs_timing, folder)

    with journal:
        handler, limit, paths = f"{__name__}:probe_file", _time_limit(options), [state[0] for state in states]
        for number, finding in run_units("probing", handler, paths, len(paths), unit, options, limit, held_fd):
            note(journal, states[number], finding)
            done += 1
            progress("probe", done, len(own))
    journal.refresh()
    if num_missing := sum(state not in journal.findings for state in sources):
        raise TasksUnfinished(Remaining("probe", num_missing, len(sources)))
    return Probed(journal.findings, sources.keys())


def journal_header(options: ShardOptions) -> dict[str, object]:
    """Return the journal's header, which contains the settings that determine the findings."""
    limits = [getattr(options.work, _time_limit(options)), options.work.worker_memory_bytes]
    rules = {"hdr": options.hdr, "verify": _is_verified(options), "timing": options.needs_timing}
    return {"probe_version": PROBE_VERSION, "limits": asdict(LIMITS), "worker_limits": limits, **rules}


def _is_verified(options: ShardOptions) -> bool:
    # Encoding decodes every frame anyway, and rejects files that do not decode.
    return options.verify == "decode" and not options.clips.is_native


def _time_limit(options: ShardOptions) -> str:
    """Return the name of the option that limits the probing time: the encoding limit if all frames are decoded."""
    return "encode_timeout_seconds" if _is_verified(options) else "probe_timeout_seconds"


def file_state(record: Record | MediaFile) -> FileState:
    """Return the path, size and version of a file, which together identify its content."""
    return (record.path, record.num_bytes, record.version)
