"""Probing of one file in a worker process, and the facts that it returns."""

from __future__ import annotations

import posixpath
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from streamvid.errors import DecodeError, ProbeError, SourceError, StorageError, StreamvidError
from streamvid.sharder.source.media import Media
from streamvid.sharder.source.spool import SpooledFile, opened
from streamvid.sharder.windows import Clip, Timing, copied
from streamvid.sharder.work.worker import clock_paused
from streamvid.video.cropping import Margins
from streamvid.video.limits import Limits

if TYPE_CHECKING:
    from fractions import Fraction

    from streamvid.sharder.source.extra_media import MediaFile
    from streamvid.sharder.source.records import Record
    from streamvid.video.container import Source

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
    "wav": "wav",
    "flac": "flac",
    "mp3": "mp3",
}
_AUDIO_EXTENSIONS = {"mov": "m4a", "matroska": "mka", "ogg": "ogg"}  # of files without pictures
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

Finding: TypeAlias = dict[str, Any]
"""JSON result of a worker, as the journal stores it, such as the fields of a Probe, or "rejected" and "kind"."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Facts that the sharder needs about a file.

    width, height: display size in pixels; 0 if the file has only audio.
    extension: extension of the tar member if the file is copied.
    timing: a `Timing` as text; "" if the sharder does not need it.
    has_audio: True if the file has readable audio; None if unknown.
    audio_start_seconds: start time of the audio minus the time of the first frame.
    audio_seconds: duration of the audio.
    audio_problem: reason why the file's audio cannot be read; "" if there is none.
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
    has_audio: bool | None = None
    audio_start_seconds: float | None = None
    audio_seconds: float | None = None
    audio_problem: str = ""

    @property
    def is_audio(self) -> bool:
        """True if the file has audio but no pictures."""
        return self.num_frames == 0 and self.has_audio is True

    @property
    def audio_end_seconds(self) -> float:
        """Time from the first frame to the end of the audio; for an audio-only file, its duration."""
        return max(0.0, (self.audio_start_seconds or 0.0) + (self.audio_seconds or 0.0))

    def without(self, bars: Margins) -> Probe:
        """Return the facts about the file after its black bars have been cropped.

        bars: (left, top, right, bottom), in pixels.
        """
        left, top, right, bottom = bars
        return replace(self, width=self.width - left - right, height=self.height - top - bottom) if any(bars) else self

    def copy_of(self, file: Record | MediaFile) -> Clip:
        """Return the clip that stores the file unchanged."""
        facts = (self.codec, self.num_frames, self.fps, self.duration_seconds, self.width, self.height)
        return Clip(file.path, file.num_bytes, self.extension, *facts)


@dataclass(frozen=True, slots=True)
class ProbeUnit:
    """Unit of work that probes one file.

    verify: True to decode every frame.
    verify_audio: True to decode all audio.
    timing: True to return the time of each frame.
    folder: directory for temporary copies of remote files; None for the system's temporary directory.
    """

    media: Media
    limits: Limits
    verify: bool
    verify_audio: bool
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
    from streamvid.video.container import OnlyAudioError
    from streamvid.video.probe import probe

    try:
        info = probe(source, unit.limits, verify=unit.verify)
    except OnlyAudioError:
        return _probe_audio(unit, source)
    timing = Timing.of(info).to_text() if unit.timing and not info.is_image else ""
    is_heif = info.is_image and info.container == "mov"
    extension = (
        _HEIF_EXTENSIONS.get(info.codec, "heic") if is_heif else clip_extension(info.container, unit.media.source)
    )
    facts = asdict(copied(Probe, info, extension=extension, timing=timing))
    return (
        {**facts, **_audio_of(unit, source, info.timestamps[0] * info.time_base)}
        if info.has_audio and not info.is_image
        else {**facts, "has_audio": False}
    )


def _probe_audio(unit: ProbeUnit, source: Source) -> Finding:
    """Return the facts about a file that has only audio. Raises ProbeError if its audio cannot be read."""
    from streamvid.video.audio.file import own_zero
    from streamvid.video.container import open_audio
    from streamvid.video.survey.audio_span import read_audio_span

    with open_audio(source, unit.limits) as file:
        container = file.container_name
    span = read_audio_span(source, unit.limits)
    if span is None:
        raise ProbeError("the file has no audio; check that the file is complete", kind="not-media")
    found = _audio_of(unit, source, own_zero(source, unit.limits))
    if found["audio_seconds"] > unit.limits.max_seconds:
        raise ProbeError(
            f"the audio lasts {found['audio_seconds']:.0f} s; the limit is max_seconds={unit.limits.max_seconds:g}",
            kind="limit",
        )
    extension = _AUDIO_EXTENSIONS.get(container) or clip_extension(container, unit.media.source)
    return {**asdict(Probe(0, 0, 0, 0.0, float(found["audio_seconds"]), span.codec, extension, False)), **found}


def _audio_of(unit: ProbeUnit, source: Source, zero: Fraction) -> Finding:
    """Return the facts about a file's audio.

    The file is rejected only if a full decode finds that its audio is damaged.

    zero: time of the first frame.
    """
    from streamvid.video.survey.audio_facts import read_audio_facts
    from streamvid.video.survey.audio_span import read_audio_span

    try:
        span = read_audio_span(source, unit.limits)
    except ProbeError as error:
        return {"has_audio": False, "audio_problem": str(error)[:200]}
    if span is None:
        return {"has_audio": False}
    if unit.verify_audio:
        try:
            read_audio_facts(source, unit.limits)
        except (ProbeError, DecodeError) as error:
            raise ProbeError(f"its audio is damaged: {error}", kind="audio") from error
    return {
        "has_audio": True,
        "audio_start_seconds": float(span.begin_seconds - zero),
        "audio_seconds": float(span.end_seconds - span.begin_seconds),
    }


def attempt(what: str, name: str, work: Callable[[], Finding]) -> Finding:
    """Run `work` on the file `name`, and return the finding. If the file causes an error, return a rejection instead.

    Raises StreamvidError if the cause is not the file but streamvid or the installation (for example, an incompatible
    library version), because otherwise every file would be rejected.
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
            f"{what} {name} failed with {type(error).__name__}: {error} ({at.filename}:{at.lineno}). The cause is "
            "the installation or a bug in streamvid, not the file. Finished work is kept; repair the installation or "
            "report the bug, then run the same command again"
        ) from error
    except MemoryError:
        return rejected(f"{what} needs more memory than work.worker_memory_bytes (--worker-memory) allows", "memory")
    except Exception as error:  # noqa: BLE001 — one bad file must not end the run, and its error is reported
        return rejected(f"{what} failed because of a bug in streamvid: {type(error).__name__}: {error}", "fault")


def rejected(reason: str, kind: str) -> Finding:
    """Return a finding that rejects a file for the given reason."""
    return {"rejected": reason, "kind": kind}


def clip_extension(container: str, source: str) -> str:
    """Return the extension of a clip's tar member, based on the file's container rather than its name.

    Each family of containers has one extension, so that .mov and .MP4 files share shards. As an exception, .webm files
    keep their extension, which implies certain codecs.
    """
    name = _EXTENSIONS.get(container)
    if name is None:
        raise ProbeError(
            f"the container {container} is not supported; convert the file to one of {', '.join(_EXTENSIONS)}",
            kind="codec",
        )
    return "webm" if name == "mkv" and posixpath.splitext(source)[1].lower() == ".webm" else name


def extension_of_name(suffix: str) -> str:
    """Return the extension of a clip in a tar file. suffix: extension of the source file."""
    return _EXTENSIONS_OF_NAMES.get(suffix, suffix)
