"""A source ─► a bucket-native clip: scaled and cropped once, made for decoding, proved before it is handed on."""

from __future__ import annotations

import time
from dataclasses import dataclass
from fractions import Fraction

from streamvid.errors import ConfigError, DecodeError
from streamvid.video.container import Source, VideoFile, open_video
from streamvid.video.encode.check import QualityMeter, check_clip
from streamvid.video.encode.cover import Cover
from streamvid.video.encode.image import encode_image
from streamvid.video.encode.profiles import Encoding
from streamvid.video.encode.source import frames_between
from streamvid.video.encode.timeline import Timeline, exact_rate, make_timeline
from streamvid.video.encode.writer import ClipWriter
from streamvid.video.limits import LIMITS, Limits
from streamvid.video.packets import PacketTable, read_packets

_MAX_SIDE = 8192


@dataclass(frozen=True, slots=True)
class EncodedClip:
    """A clip as it is stored, and what is known of it.

    - data: the file; extension: "mp4", for images "jpg" or "png". codec: as FFmpeg names it. width, height: in pixels.
    - num_frames; fps: the average, 0.0 for an image; duration_seconds: to the end of the last frame, 0.0 for an image.
    - psnr_y: of all luma against the pictures that were encoded (the direct resize of the source), in decibels; 100.0
      where nothing was lost. encode_seconds: of CPU, for everything, decoding and proof among it.
    """

    data: bytes
    extension: str
    codec: str
    num_frames: int
    fps: float
    duration_seconds: float
    width: int
    height: int
    psnr_y: float
    encode_seconds: float

    @property
    def num_bytes(self) -> int:
        return len(self.data)


def encode_clip(
    source: Source,
    *,
    height: int,
    width: int,
    encoding: Encoding,
    start: int = 0,
    num_frames: int | None = None,
    fps: float | Fraction | None = None,
    timeline: Timeline | None = None,
    limits: Limits = LIMITS,
) -> EncodedClip:
    """Encode frames `start` to `start + num_frames` (None: to the end) of `source` at (height, width) pixels.

    source: as for `decode_into`. Frames are the source's, each scaled and cropped as `Transform.cover` says, upright,
    at the source's exact times, the first moved to 0; with `fps`, frames 1/fps apart, each the source's nearest in
    time. timeline: instead of start, num_frames and fps: which frames there are and when, for a source that goes with
    another one frame by frame. Colours keep the source's matrix and range and are always tagged, in the bitstream and
    in the container; JPEG pictures (codec mjpeg, and still images) are BT.601 of full range, which is all that they can
    be. Still images stay images: JPEG of high quality, PNG where the encoding is ffv1.

    The clip is decoded before it is handed on: every frame must come out, at its time, with the key frames promised.
    The same arguments give the same bytes. One thread, and memory for the frames under way only.

    Raises ConfigError for arguments that cannot be, ProbeError where the source is not supported (see `probe`),
    DecodeError where one of the frames does not decode.
    """
    _check_size(height, width)
    begin = time.process_time()
    with open_video(source, limits) as video:
        table = read_packets(video)
        if video.is_image:
            make_timeline(table.timestamps, table.time_base, 1, start=start, num_frames=num_frames)
            still = encode_image(video, table, height, width, encoding, limits)
            spent = time.process_time() - begin
            facts = (still.data, still.extension, still.codec, 1, 0.0, 0.0, width, height, still.psnr_y)
            return EncodedClip(*facts, encode_seconds=spent)
        timeline = timeline or make_timeline(
            table.timestamps,
            table.time_base,
            table.last_duration,
            start=start,
            num_frames=num_frames,
            fps=None if fps is None else exact_rate(fps),
            usual_rate=video.stream.average_rate,
        )
        if timeline.numbers[-1] >= len(table.timestamps):
            raise DecodeError(f"frame {timeline.numbers[-1]} is wanted, the video has {len(table.timestamps)}")
        data, psnr_y = _encode_from_either(video, table, timeline, (height, width), encoding, limits)
    return EncodedClip(
        data=data,
        extension="mp4",
        codec=encoding.profile.codec,
        num_frames=len(timeline.numbers),
        fps=timeline.fps,
        duration_seconds=float(timeline.duration_seconds),
        width=width,
        height=height,
        psnr_y=psnr_y,
        encode_seconds=time.process_time() - begin,
    )


def _check_size(height: int, width: int) -> None:
    for name, value in (("height", height), ("width", width)):
        if not 16 <= value <= _MAX_SIDE or value % 2:
            raise ConfigError(f"{name} is {value}, a native clip's must be even, from 16 to {_MAX_SIDE}")


def _encode_from_either(
    video: VideoFile,
    table: PacketTable,
    timeline: Timeline,
    size: tuple[int, int],
    encoding: Encoding,
    limits: Limits,
) -> tuple[bytes, float]:
    """The clip and its PSNR, decoded from the key frame before it, or from one further back where that one lied."""
    problem: DecodeError | None = None
    try:
        for key in table.decode_starts(timeline.numbers[0], timeline.numbers[-1]):
            try:
                return _encode_from(video, table, key, timeline, size, encoding, limits)
            except DecodeError as error:
                problem = problem or error
        raise problem or DecodeError(f"no key frame comes before frame {timeline.numbers[0]}: it cannot be decoded")
    finally:
        # An error and the variable that names it hold each other, and with them the decoder and all its pictures.
        del problem


def _encode_from(
    video: VideoFile,
    table: PacketTable,
    key: tuple[int, int],
    timeline: Timeline,
    size: tuple[int, int],
    encoding: Encoding,
    limits: Limits,
) -> tuple[bytes, float]:
    frames = frames_between(video, table, key, timeline.numbers[0], timeline.numbers[-1])
    number, frame = next(frames)
    cover = Cover(video, frame, *size, "yuvj420p" if encoding.codec == "mjpeg" else "yuv420p")
    writer = ClipWriter(encoding, timeline, *size, cover.tags)
    try:
        meter = QualityMeter(encoding.profile.decoder, writer.header, *size)
        for position, wanted in enumerate(timeline.numbers):
            while number < wanted:
                number, frame = next(frames)
            picture = cover.picture(frame)
            meter.expect(position, picture)
            for shown, packet in writer.write(picture, position):
                meter.take(shown, packet)
        for shown, packet in writer.finish():
            meter.take(shown, packet)
    finally:
        writer.close()
    psnr_y = meter.finish()
    check_clip(writer.data, encoding, timeline, cover.tags, meter.checksums, limits)
    return writer.data, psnr_y
