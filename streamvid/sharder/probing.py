"""Probing: workers, which a hostile file may kill, find out what each record's file is."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from streamvid.buckets.pick import exact_seconds
from streamvid.errors import DecodeError, ProbeError, SourceError, StorageError
from streamvid.host.journal import FileState, Journal
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.rejections import Reason
from streamvid.sharder.source.extra_media import MediaFile
from streamvid.sharder.source.media import Media
from streamvid.sharder.source.records import Record
from streamvid.sharder.source.spool import SpooledFile
from streamvid.sharder.windows import Timing
from streamvid.sharder.work.pool import Crash, Pool, WorkerLimits, timed_out
from streamvid.sharder.work.worker import clock_paused
from streamvid.video.limits import LIMITS

if TYPE_CHECKING:
    from streamvid.video.container import Source

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with (phase, done, total); phases are "records", "probe", "encode", "build" and "seal"."""

PROBE_VERSION = 3
MAX_REASON_CHARS = 500
_EXTENSIONS = {
    "mov": "mp4",
    "matroska": "mkv",
    "avi": "avi",
    "mpegts": "ts",
    "mpeg": "mpg",
    "flv": "flv",
    "asf": "wmv",
    "gif": "gif",
    "jpeg_pipe": "jpg",
    "png_pipe": "png",
    "webp_pipe": "webp",
    "bmp_pipe": "bmp",
    "tiff_pipe": "tif",
}


@dataclass(frozen=True, slots=True)
class Probe:
    """Part of a VideoInfo that the sharder needs: display size in pixels, frames, and the extension of a copy.

    timing: a `Timing` as text, or empty.
    """

    width: int
    height: int
    num_frames: int
    fps: float
    duration_seconds: float
    codec: str
    extension: str
    is_image: bool
    timing: str = ""

    @property
    def seconds(self) -> Fraction:
        """Exact `duration_seconds`, the same that readers of the index compute."""
        return exact_seconds(self.duration_seconds)


Finding: TypeAlias = dict[str, Any]
"""JSON of what a worker found, as the journal holds it: fields of a Probe or of a Clip, or {"rejected", "kind"}."""


@dataclass(frozen=True, slots=True)
class ProbeTask:
    """One file to probe.

    verify: decode every frame.   timing: find out when each frame is shown.
    folder: place for what is read of an object meanwhile; None: a temporary file.
    """

    media: Media
    allow_hdr: bool
    verify: bool
    timing: bool
    folder: str | None

    def probe(self, source: Source) -> Finding:
        """Probe the opened file."""
        from streamvid.video.probe import probe

        info = probe(source, replace(LIMITS, allow_hdr=self.allow_hdr), verify=self.verify)
        found = Probe(
            width=info.width,
            height=info.height,
            num_frames=info.num_frames,
            fps=info.fps,
            duration_seconds=info.duration_seconds,
            codec=info.codec,
            extension=clip_extension(info.container, self.media.source),
            is_image=info.is_image,
            timing=Timing.of(info).to_text() if self.timing and not info.is_image else "",
        )
        return asdict(found)


def probe_file(value: dict[str, Any]) -> Finding:
    """Probe one file. Runs in a worker.

    For an object, "bytes_read" in the finding says how much of it was read. Raises StorageError if its store fails and
    SourceError if the file is no longer the one that was listed: neither is a reason against the file.
    """
    task = ProbeTask(**{**value, "media": Media.from_json(value["media"])})
    if not task.media.is_remote:
        with task.media.opened() as local:
            return attempt("probing", lambda: task.probe(local))
    with SpooledFile(task.media, None if task.folder is None else Path(task.folder), clock_paused) as file:
        finding = attempt("probing", lambda: task.probe(file))
        if file.error is not None:  # a demuxer may have taken it for the end of the file
            raise file.error
        return {**finding, "bytes_read": file.bytes_read}


def attempt(what: str, work: Callable[[], Finding]) -> Finding:
    """Run the work on one file; an error that is the file's own becomes a rejection."""
    try:
        return work()
    except (ProbeError, DecodeError) as error:
        return rejected(str(error), getattr(error, "kind", "") or "damaged")
    except (SourceError, StorageError):
        raise
    except OSError as error:
        return rejected(f"cannot be read: {error.strerror or error}", "unreadable-file")
    except MemoryError:
        return rejected("needs more memory than worker_memory_bytes allows", "memory")
    except Exception as error:  # noqa: BLE001 — one odd file among a million must not end the run, and is not lost
        return rejected(f"{what} failed on it, which is a fault of streamvid: {type(error).__name__}: {error}", "fault")


def rejected(reason: str, kind: str) -> Finding:
    """Return the finding of a file that cannot be used."""
    return {"rejected": reason, "kind": kind}


def clip_extension(container: str, source: str) -> str:
    """Return the extension of a clip's member in a tar, by the file's container and not by its name.

    There is one extension per family, so that .mov and .MP4 share a shard. Only .webm is kept, because it promises its
    codecs.
    """
    name = _EXTENSIONS.get(container)
    if name is None:
        raise ProbeError(f"the container {container} is not stored; allowed are {', '.join(_EXTENSIONS)}", kind="codec")
    return "webm" if name == "mkv" and posixpath.splitext(source)[1].lower() == ".webm" else name


def probe_all(
    records: Sequence[Record],
    options: ShardOptions,
    journal: Journal,
    held_fd: int,
    progress: Progress,
    folder: Path | None = None,
) -> Mapping[FileState, Probe | str]:
    """Return a Probe or the reason of a rejection for each record's file, whatever the number of workers.

    folder: place for what is read of objects meanwhile. A file that crashes the decoder, exceeds
    `probe_timeout_seconds` or exceeds `worker_memory_bytes` is rejected.
    """
    files: list[Record | MediaFile] = [*records, *chain.from_iterable(record.extra for record in records)]
    sources = {file_state(file): file for file in files}
    states = [state for state in sources if state not in journal.findings]
    limits = WorkerLimits(_timeout(options)[1], options.work.worker_memory_bytes)
    done = len(sources) - len(states)
    progress("probe", done, len(sources))
    storage, shared = options.worker_storage, None if folder is None else str(folder)

    def task(number: int) -> dict[str, Any]:
        media = sources[states[number]].media(storage)
        return asdict(ProbeTask(media, options.hdr == "allow", _is_verified(options), options.needs_timing, shared))

    with (
        journal,
        Pool(f"{__name__}:probe_file", min(options.work.workers, max(1, len(states))), limits, held_fd) as pool,
    ):
        for number, answer in pool.run(len(states), task):
            finding = _of_crash(answer, options) if isinstance(answer, Crash) else answer
            journal.add(states[number], finding)
            done += 1
            progress("probe", done, len(sources))
    return {state: _finding(journal.findings[state], state[0], record.source) for state, record in sources.items()}


def probe_bytes_read(states: Iterable[FileState], journal: Journal) -> int | None:
    """Return how many bytes of objects were read, in this run or an earlier one; None if no file is an object."""
    read = [journal.findings[state]["bytes_read"] for state in states if "bytes_read" in journal.findings[state]]
    return sum(read) if read else None


def journal_header(options: ShardOptions) -> dict[str, Any]:
    """Return the rules that findings depend on."""
    limits = [_timeout(options)[1], options.work.worker_memory_bytes]
    rules = {"hdr": options.hdr, "verify": _is_verified(options), "timing": options.needs_timing}
    return {"probe_version": PROBE_VERSION, "limits": asdict(LIMITS), "worker_limits": limits, **rules}


def _is_verified(options: ShardOptions) -> bool:
    # Encoding decodes every frame anyway, and rejects what does not decode.
    return options.verify == "decode" and not options.clips.is_native


def _timeout(options: ShardOptions) -> tuple[str, float]:
    """Decoding all frames takes as long as encoding may."""
    name = "encode_timeout_seconds" if _is_verified(options) else "probe_timeout_seconds"
    return name, getattr(options.work, name)


def file_state(record: Record | MediaFile) -> FileState:
    """Return what distinguishes a version of the file from another one."""
    return (record.path, record.num_bytes, record.version)


def _finding(finding: Finding, path: str, source: str) -> Probe | Reason:
    if "rejected" in finding:
        # No path of this machine goes into a sealed dataset (SHARD-1).
        return Reason(str(finding["rejected"]).replace(path, source)[:MAX_REASON_CHARS], finding.get("kind", "damaged"))
    return Probe(**{name: value for name, value in finding.items() if name != "bytes_read"})


def _of_crash(crash: Crash, options: ShardOptions) -> Finding:
    if timed_out(crash):
        name, seconds = _timeout(options)
        return rejected(f"probing took longer than {name}={seconds:g}", "timeout")
    return rejected(f"the decoder crashed on it ({crash})", "crash")
