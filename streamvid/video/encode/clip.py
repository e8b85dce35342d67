"""A source ─► a bucket-native clip or image: scaled and cropped once, cheap to decode, verified before it is returned.

The encoder sees frames at one constant rate, so that neither its choices nor its header depend on the source's timing:
clips of one size have equal headers, and one open decoder serves them all. True times are written with the packets.

A JPEG keeps all its colour samples (4:4:4). An image is one picture, so a third more work to decode costs nothing
beside a clip's sixteen or more, and coloured letters and edges are what images are added to a video dataset for.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import TYPE_CHECKING, cast

from streamvid.errors import ConfigError, DecodeError, ProbeError
from streamvid.video.container import Source, VideoFile, ffmpeg_errors, open_video
from streamvid.video.encode.check import LOSSLESS_PSNR, QualityMeter, check_clip, picture_checksum
from streamvid.video.encode.cover import ColorTags, Cover
from streamvid.video.encode.profiles import Encoding
from streamvid.video.encode.timeline import Timeline, exact_rate, make_timeline
from streamvid.video.limits import LIMITS, Limits
from streamvid.video.packets import PacketTable, each_packet, read_packets

if TYPE_CHECKING:
    from av.bitstream import BitStreamFilterContext
    from av.packet import Packet
    from av.video.codeccontext import VideoCodecContext
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

_MAX_SIDE = 8192
_MAX_REORDER_DEPTH = 16
_RATE = 25


@dataclass(frozen=True, slots=True)
class EncodedClip:
    """An encoded clip and its properties.

    - data: the file.   extension: "mp4", or "jpg" or "png" for images.   codec: FFmpeg's name.
    - fps: average, 0.0 for an image.   duration_seconds: to the end of the last frame, 0.0 for an image.
    - psnr_y: of all luma against the pictures that were encoded (the direct resize of the source), in decibels; 100.0
      if nothing was lost.   encode_seconds: CPU time for everything, including decoding and verification.
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

    source: as for `decode_into`. Each frame is scaled and cropped by `Transform.cover`, upright, and keeps its exact
    time relative to the first; with `fps`, frames are 1/fps apart, each the source's nearest in time.
    timeline: replaces start, num_frames and fps, for a source that follows another one frame by frame.

    Colours keep the source's matrix and range and are always tagged, in the bitstream and in the container. JPEG
    pictures (codec mjpeg, and still images) can only be BT.601 of full range. Still images stay images: JPEG of high
    quality, or PNG if the encoding is ffv1.

    The clip is decoded before it is returned: every frame must be there, at its time, with the promised key frames.
    The same arguments give the same bytes. It takes one thread, and memory for a few frames only.

    Raises ConfigError for invalid arguments, ProbeError if the source is not supported (see `probe`), DecodeError if
    one of the frames does not decode.
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
            raise ConfigError(f"{name}={value}: must be an even number from 16 to {_MAX_SIDE} in a native clip")


def _encode_from_either(
    video: VideoFile,
    table: PacketTable,
    timeline: Timeline,
    size: tuple[int, int],
    encoding: Encoding,
    limits: Limits,
) -> tuple[bytes, float]:
    """Return the clip and its PSNR, decoded from the key frame before it, or from one further back if that is none."""
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


# Decoded frames of the source.


def frames_between(
    video: VideoFile, table: PacketTable, key: tuple[int, int], first: int, last: int
) -> Iterator[tuple[int, VideoFrame]]:
    """Yield (frame number, decoded frame) for `first` to `last`, decoded from `key`, one of `decode_starts`.

    Each frame is verified by its timestamp: raises DecodeError at the first that is damaged, missing or out of place.
    """
    key_time, key_ordinal = key
    expected = iter(range(first, last + 1))
    number = next(expected)
    times = table.timestamps
    for frame in _decoded(video, table, key_ordinal, max(table.ordinals[first : last + 1])):
        # Frames shown before the key frame may refer to pictures before it: damaged, but not wanted.
        if frame.is_corrupt and (frame.pts is None or frame.pts >= key_time):
            raise DecodeError(f"the video is damaged: the frame at timestamp {frame.pts} does not decode cleanly")
        if frame.pts is None or frame.pts < times[number]:
            continue
        if frame.pts != times[number]:
            break
        yield number, frame
        following = next(expected, None)
        if following is None:
            return
        number = following
    raise DecodeError(f"frame {number} does not decode: damaged data, or timestamps that lie")


def _decoded(video: VideoFile, table: PacketTable, first_ordinal: int, last_ordinal: int) -> Iterator[VideoFrame]:
    video.reopen()
    if video.codec_name == "h264":
        # A decoder that starts in the middle must not have to find out by losing frames.
        video.decoder.reorder_depth = min(max(video.decoder.reorder_depth, table.reorder_depth), _MAX_REORDER_DEPTH)
    at: int | None = None
    try:
        with ffmpeg_errors("the video does not decode"):
            for packet in islice(each_packet(video), first_ordinal, last_ordinal + 1):
                at = packet.pts
                yield from video.decoder.decode(packet)
            yield from video.decoder.decode(None)
    except ProbeError as error:
        raise DecodeError(f"{error}, near timestamp {at}") from error


# The MP4 of a clip.


class ClipWriter:
    """Encoder and in-memory MP4 of one track. The bytes are a function of the arguments and the pictures."""

    def __init__(self, encoding: Encoding, timeline: Timeline, height: int, width: int, tags: ColorTags) -> None:
        import av
        from av.codec.context import Flags

        # SVT-AV1 writes to standard error whatever FFmpeg's log level is.
        os.environ.setdefault("SVT_LOG", "0")
        self._timeline, self._sink = timeline, io.BytesIO()
        # bitexact: no clock and no versions. Time begins at 0, nothing is reordered: no edit list is needed.
        self._container = av.open(self._sink, "w", format="mp4", options={"fflags": "+bitexact", "use_editlist": "0"})
        self._stream = cast(
            "VideoStream",
            self._container.add_stream(encoding.profile.encoder, rate=_RATE, options=encoding.encoder_options()),
        )
        encoder = self._stream.codec_context
        encoder.width = width
        encoder.height = height
        encoder.pix_fmt = "yuv420p"
        encoder.sample_aspect_ratio = Fraction(1)
        encoder.time_base = Fraction(1, _RATE)
        encoder.colorspace, encoder.color_range = tags.matrix, tags.color_range
        encoder.color_primaries, encoder.color_trc = tags.primaries, tags.transfer
        encoder.thread_count = 1
        encoder.gop_size = encoding.gop
        encoder.max_b_frames = 0
        encoder.flags |= Flags.bitexact
        self._stream.time_base = timeline.time_base
        self._container.start_encoding()
        self._filter = _no_messages(self._stream) if encoding.codec == "h264" else None

    @property
    def header(self) -> bytes:
        """The decoder's extradata."""
        return bytes(self._stream.codec_context.extradata or b"")

    def write(self, picture: VideoFrame, number: int) -> list[tuple[int, bytes]]:
        """Encode a picture as frame `number`; return (frame number, packet) of the packets that were written."""
        picture.pts, picture.time_base = number, Fraction(1, _RATE)
        return list(self._mux(self._stream.codec_context.encode(picture)))

    def finish(self) -> list[tuple[int, bytes]]:
        """Write and return the packets that the encoder held back; then `data` is complete."""
        packets = list(self._mux(self._stream.codec_context.encode(None)))
        self.close()
        return packets

    @property
    def data(self) -> bytes:
        return self._sink.getvalue()

    def close(self) -> None:
        self._container.close()

    def _mux(self, packets: list[Packet[VideoStream]]) -> Iterator[tuple[int, bytes]]:
        for packet in packets:
            for kept in self._filter.filter(packet) if self._filter else [packet]:
                number = cast("int", kept.pts)
                yield number, bytes(kept)
                kept.stream, kept.time_base = self._stream, self._timeline.time_base
                kept.pts = kept.dts = self._timeline.ticks[number]
                kept.duration = self._timeline.ticks_shown(number)
                self._container.mux_one(kept)


def _no_messages(stream: VideoStream) -> BitStreamFilterContext:
    """Return a filter that drops SEI units, where x264 puts its version and settings, some 700 bytes per clip."""
    from av.bitstream import BitStreamFilterContext

    return BitStreamFilterContext("filter_units=remove_types=6", stream)


# Still images.


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An encoded image: file, usual extension ("jpg" or "png"), FFmpeg's name of the codec, and PSNR of luma."""

    data: bytes
    extension: str
    codec: str
    psnr_y: float


def encode_image(
    video: VideoFile, table: PacketTable, height: int, width: int, encoding: Encoding, limits: Limits
) -> EncodedImage:
    """Encode a still image: a lossless PNG if `encoding` is ffv1, else a JPEG of quantiser 2 (BT.601, full range).

    Raises as `encode_clip` does.
    """
    import av
    from av.codec.context import Flags

    is_png = encoding.codec == "ffv1"
    codec, pixel_format = ("png", "rgb24") if is_png else ("mjpeg", "yuvj444p")
    _, frame = next(frames_between(video, table, table.keys[0], 0, 0))
    cover = Cover(video, frame, height, width, pixel_format)
    picture = cover.picture(frame)
    encoder = cast("VideoCodecContext", av.CodecContext.create(codec, "w"))
    encoder.width = width
    encoder.height = height
    encoder.pix_fmt = pixel_format
    encoder.time_base, encoder.thread_count = Fraction(1, 25), 1
    encoder.color_range, encoder.colorspace = cover.tags.color_range, cover.tags.matrix
    encoder.flags |= Flags.bitexact
    encoder.options = {"pred": "mixed"} if is_png else {"qmin": "2", "qmax": "2", "huffman": "optimal"}
    picture.pts, picture.time_base = 0, encoder.time_base
    data = b"".join(bytes(packet) for packet in [*encoder.encode(picture), *encoder.encode(None)])
    if is_png:
        psnr_y, checksum = LOSSLESS_PSNR, picture_checksum(picture)
    else:
        meter = QualityMeter(codec, b"", height, width)
        meter.expect(0, picture)
        meter.take(0, data)
        psnr_y, checksum = meter.finish(), meter.checksums[0]
    _check_image(data, codec, checksum, limits)
    return EncodedImage(data, "png" if is_png else "jpg", codec, psnr_y)


def _check_image(data: bytes, codec: str, checksum: int, limits: Limits) -> None:
    """Raise DecodeError unless `data` is one image of this codec that decodes to this picture."""
    try:
        with open_video(data, limits) as video:
            is_right = video.is_image and video.codec_name == codec and len(read_packets(video).timestamps) == 1
            video.reopen()
            with ffmpeg_errors("it does not decode"):
                frames = [f for packet in [*each_packet(video), None] for f in video.decoder.decode(packet)]
            if not is_right or [picture_checksum(frame) for frame in frames] != [checksum]:
                raise DecodeError("it is another picture")
    except (DecodeError, ProbeError) as error:
        raise DecodeError(f"the written image is not what was encoded: {error}") from error
