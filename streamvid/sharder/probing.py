"""Probing: what each record's file is, found out by workers that a hostile file may kill."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from streamvid.buckets.pick import exact_seconds
from streamvid.errors import ProbeError, SourceError, StorageError
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
    from streamvid.video.info import VideoInfo
    from streamvid.video.limits import Limits

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
    """What the sharder keeps of a VideoInfo: display size in pixels, frames, and the extension that a copy of it gets.

    timing: a `Timing` as text, where it was asked for.
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
        """`duration_seconds` exactly, as readers of the index make of it."""
        return exact_seconds(self.duration_seconds)


def probe_file(task: dict[str, Any]) -> dict[str, Any]:
    """The finding on one file: a Probe's fields, or {"rejected": reason}. Runs in a worker.

    For an object, "bytes_read" says how much of it was read. Raises StorageError where its store fails, SourceError
    where it is no longer the one that was listed: neither is a reason against the file.
    """
    media = Media.from_json(task["media"])
    if not media.is_remote:
        with media.opened() as local:
            return _find(task, lambda limits: _probe(local, limits, task))
    with SpooledFile(media, None if task["folder"] is None else Path(task["folder"]), clock_paused) as file:
        finding = _find(task, lambda limits: _probe(file, limits, task))
        if file.error is not None:  # a demuxer may have taken it for the end of the file
            raise file.error
        return {**finding, "bytes_read": file.bytes_read}


def _probe(file: Source, limits: Limits, task: dict[str, Any]) -> VideoInfo:
    from streamvid.video import probe

    return probe(file, limits, verify=task["verify"])


def _find(task: dict[str, Any], probe: Callable[[Limits], VideoInfo]) -> dict[str, Any]:
    try:
        info = probe(replace(LIMITS, allow_hdr=task["hdr"] == "allow"))
        extension = clip_extension(info.container, task["media"]["source"])
    except ProbeError as error:
        return {"rejected": str(error), "kind": error.kind or "damaged"}
    except (SourceError, StorageError):
        raise
    except OSError as error:
        return {"rejected": f"cannot be read: {error.strerror or error}", "kind": "unreadable-file"}
    except MemoryError:
        return {"rejected": "needs more memory than worker_memory_bytes allows", "kind": "memory"}
    except Exception as error:  # noqa: BLE001 — one odd file among a million must not end the run, and is not lost
        said = f"probing failed on it, which is a fault of streamvid: {type(error).__name__}: {error}"
        return {"rejected": said, "kind": "fault"}
    found = Probe(
        info.width, info.height, info.num_frames, info.fps, info.duration_seconds, info.codec, extension, info.is_image
    )
    timing = Timing.of(info).to_text() if task["timing"] and not info.is_image else ""
    return {**asdict(found), "timing": timing}


def clip_extension(container: str, source: str) -> str:
    """The extension of a clip's member in a tar, by what the file is and not by what it is called.

    One name for each family, so that .mov and .MP4 land in one shard; .webm alone is kept, as a promise of its codecs.
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
    """A Probe or the reason of a rejection for each record's file, whatever the number of workers.

    folder: where what is read of objects lies meanwhile. A file that crashes the decoder, outruns
    `probe_timeout_seconds` or outgrows `worker_memory_bytes` is a reason too.
    """
    files: list[Record | MediaFile] = [*records, *chain.from_iterable(record.extra for record in records)]
    sources = {file_state(file): file for file in files}
    states = [state for state in sources if state not in journal.findings]
    limits = WorkerLimits(_timeout(options)[1], options.work.worker_memory_bytes)
    done = len(sources) - len(states)
    progress("probe", done, len(sources))
    shared = {**_rules(options), "folder": None if folder is None else str(folder)}
    storage = options.worker_storage

    def task(number: int) -> dict[str, Any]:
        return {"media": sources[states[number]].media(storage).to_json(), **shared}

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
    """How much was read of those that are objects, whenever it was; None where none is."""
    read = [journal.findings[state]["bytes_read"] for state in states if "bytes_read" in journal.findings[state]]
    return sum(read) if read else None


def journal_header(options: ShardOptions) -> dict[str, Any]:
    """The rules that findings depend on."""
    limits = [_timeout(options)[1], options.work.worker_memory_bytes]
    return {"probe_version": PROBE_VERSION, "limits": asdict(LIMITS), "worker_limits": limits, **_rules(options)}


def _rules(options: ShardOptions) -> dict[str, Any]:
    return {"hdr": options.hdr, "verify": _is_verified(options), "timing": options.needs_timing}


def _is_verified(options: ShardOptions) -> bool:
    # Encoding decodes every frame anyway, and rejects what does not decode.
    return options.verify == "decode" and not options.clips.is_native


def _timeout(options: ShardOptions) -> tuple[str, float]:
    """Decoding all frames takes as long as encoding may."""
    name = "encode_timeout_seconds" if _is_verified(options) else "probe_timeout_seconds"
    return name, getattr(options.work, name)


def file_state(record: Record | MediaFile) -> FileState:
    """What tells the record's file, or a medium's, from another version of it."""
    return (record.path, record.num_bytes, record.version)


def _finding(finding: dict[str, Any], path: str, source: str) -> Probe | Reason:
    if "rejected" in finding:
        # No path of this machine goes into a sealed dataset (SHARD-1).
        return Reason(str(finding["rejected"]).replace(path, source)[:MAX_REASON_CHARS], finding.get("kind", "damaged"))
    return Probe(**{name: value for name, value in finding.items() if name != "bytes_read"})


def _of_crash(crash: Crash, options: ShardOptions) -> dict[str, Any]:
    if timed_out(crash):
        name, seconds = _timeout(options)
        return {"rejected": f"probing took longer than {name}={seconds:g}", "kind": "timeout"}
    return {"rejected": f"the decoder crashed on it ({crash})", "kind": "crash"}
