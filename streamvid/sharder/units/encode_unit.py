"""Encoding of one clip in a worker process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from streamvid.buckets.bucket import Bucket
from streamvid.sharder.source.media import Media
from streamvid.sharder.source.spool import opened
from streamvid.sharder.units.probe_unit import Finding, attempt
from streamvid.sharder.windows import Clip, Timing, Window, copied
from streamvid.sharder.work.clips import ClipFolder
from streamvid.sharder.work.worker import clock_paused
from streamvid.video.cropping import Margins
from streamvid.video.encode.audio_profiles import MadeAudioCodec
from streamvid.video.encode.made import MadeClip
from streamvid.video.encode.profiles import Encoding
from streamvid.video.encode.timeline import Timeline, make_timeline
from streamvid.video.limits import Limits

if TYPE_CHECKING:
    from streamvid.video.container import Source


@dataclass(frozen=True, slots=True)
class EncodeUnit:
    """Unit of work that encodes a window of `media` into the clip `name` in `clips`.

    follows: for conditioning videos and audio, the Timing of the sample's source as text; otherwise "".
    bars: black bars to crop: (left, top, right, bottom), in pixels.
    max_bytes: maximum size of the clip; None for no limit.
    audio: codec of the audio; None to omit it.
    seconds: duration of conditioning audio, used if the clip has no frame times; None for other files.
    fps: output frame rate; None keeps all frames of the window.
    """

    media: Media
    name: str
    window: Window
    bucket: Bucket
    follows: str
    is_mask: bool
    bars: Margins
    max_bytes: float | None
    clips: ClipFolder
    encoding: Encoding
    audio: MadeAudioCodec | None
    seconds: Fraction | None
    fps: Fraction | None
    limits: Limits


def encode_file(unit: EncodeUnit) -> Finding:
    """Encode a clip and store it in the staging folder. Runs in a worker.

    Raises SourceError if the file has changed since it was probed, and StorageError if writing fails.
    """
    return attempt_on("encoding", unit.media, unit.clips, lambda source: _encode(unit, source))


def attempt_on(what: str, media: Media, clips: ClipFolder, work: Callable[[Source], Finding]) -> Finding:
    """Run `work` on a file, and return the finding. If the file causes an error, return a rejection instead.

    Raises SourceError if the file was removed or changed after it was probed.
    """
    media.check_unchanged()
    if media.has_checksum:
        data = media.read()
        finding = attempt(what, media.source, lambda: work(data))
    else:
        with opened(media, clips.folder, clock_paused) as source:
            finding = attempt(what, media.source, lambda: work(source))
    media.check_unchanged()
    return finding


def put_clip(clips: ClipFolder, name: str, made: MadeClip) -> Finding:
    """Store a clip in the staging folder, and return a finding with facts about the clip."""
    clips.put(name, made.data)
    digest, psnr_y = hashlib.sha256(made.data).hexdigest(), None if made.psnr_y is None else round(made.psnr_y, 4)
    return asdict(copied(Clip, made, path="", num_bytes=made.num_bytes, sha256=digest, psnr_y=psnr_y))


def _encode(unit: EncodeUnit, source: Source) -> Finding:
    from streamvid.video.encode.clip import encode_clip

    if unit.seconds is not None:
        return put_clip(unit.clips, unit.name, _encode_audio(unit, source, unit.seconds))
    made = encode_clip(
        source,
        height=unit.bucket.height,
        width=unit.bucket.width,
        encoding=unit.encoding,
        start=unit.window.start,
        num_frames=unit.window.num_frames,
        fps=unit.fps,
        timeline=_timeline(unit) if unit.follows else None,
        is_mask=unit.is_mask,
        bars=unit.bars,
        max_bytes=unit.max_bytes,
        audio=unit.audio,
        limits=unit.limits,
    )
    return put_clip(unit.clips, unit.name, made)


def _encode_audio(unit: EncodeUnit, source: Source, seconds: Fraction) -> MadeClip:
    """Encode the audio in the window. Times are measured from the first frame of the sample's source."""
    from streamvid.video.encode.audio_file import encode_audio_file

    assert unit.audio is not None
    start = Fraction(0)
    if unit.follows:
        timing, first = Timing.from_text(unit.follows), unit.window.start
        start, seconds = timing.seconds(0, first), timing.seconds(first, first + unit.window.num_frames)
    return encode_audio_file(source, start, seconds, unit.audio, unit.limits)


def _timeline(unit: EncodeUnit) -> Timeline:
    """Return the timeline of the sample's clip, whose frames and times a conditioning video must match."""
    timing = Timing.from_text(unit.follows)
    return make_timeline(
        tuple(timing.timestamps),
        timing.time_base,
        timing.last_duration,
        start=unit.window.start,
        num_frames=unit.window.num_frames,
        fps=unit.fps,
        usual_rate=timing.usual_rate,
    )
