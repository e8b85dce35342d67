"""Encoding a source as a bucket-native clip or image: scaled and cropped once, cheap to decode, and verified.

The encoder sees frames at one constant rate, so that neither its choices nor its header depend on the source's timing.
Clips of one size have equal headers, and one open decoder serves them all. The muxer writes the true times.

JPEG images keep full chroma resolution (4:4:4). Decoding takes a third more work, which is negligible for a single
picture, and colored letters and edges stay sharp.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

from streamvid.errors import ConfigError, DecodeError, ProbeError
from streamvid.video.container import Source, VideoFile, open_video
from streamvid.video.cropping import NO_MARGINS, Margins
from streamvid.video.decode.file import decode_from, from_key_frame
from streamvid.video.encode.audio import AudioTrack, AudioWindow, check_track, find_window, muxer_options
from streamvid.video.encode.audio_profiles import MadeAudioCodec
from streamvid.video.encode.check import LOSSLESS_PSNR, QualityMeter, check_clip, picture_checksum
from streamvid.video.encode.cover import ColorTags, Cover
from streamvid.video.encode.made import MadeClip
from streamvid.video.encode.profiles import Encoding
from streamvid.video.encode.timeline import Timeline, exact_rate, make_timeline
from streamvid.video.limits import LIMITS, Limits
from streamvid.video.packets import PacketTable, decoded, read_packets

if TYPE_CHECKING:
    from av.packet import Packet
    from av.video.codeccontext import VideoCodecContext
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

_MAX_SIDE = 8192
_RATE = 25


class _Size(NamedTuple):
    """Size of a clip's pictures, and the margins to crop from each displayed frame of the source."""

    height: int
    width: int
    bars: Margins


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
    is_mask: bool = False,
    bars: Margins = NO_MARGINS,
    max_bytes: float | None = None,
    audio: MadeAudioCodec | None = None,
    limits: Limits = LIMITS,
) -> MadeClip:
    """Encode frames `start` to `start + num_frames` (exclusive) of a source as pictures of size (height, width).

    If `num_frames` is None, all frames from `start` on are encoded.

    source: as for `decode_into`.
    fps: frame rate of the clip; each frame is then the source frame nearest in time. None keeps the exact times of the
        source frames relative to the first.
    timeline: replaces `start`, `num_frames` and `fps` for a source that follows another source frame by frame.
    is_mask: True to keep the values of a mask (MaskReader), without loss and in one channel, regardless of `encoding`.
    bars: number of pixels to crop from the displayed frame before scaling, as (left, top, right, bottom).
    audio: codec for the clip's audio; None omits the audio. The track contains the source's audio from the first frame
        to the end of the last: in mono if the source is mono, otherwise in stereo. If the source has no audio during
        this time, the clip has no audio track.
    max_bytes: maximum size of a video clip. A larger clip is encoded again with a higher crf, until it fits or the
        codec's highest crf is reached.

    Each frame is scaled, cropped and turned upright by `Transform.cover`. Colors keep the source's matrix and range and
    are always tagged, in the bitstream and in the container. JPEG pictures (codec mjpeg, and still images) are always
    full-range BT.601. Still images stay images: high-quality JPEG, or PNG if the codec is ffv1.

    The clip is decoded before it is returned: every frame must be present at its time, with the expected key frames.
    The same arguments give the same bytes. Encoding uses one thread and keeps only a few frames in memory.

    Raises ConfigError for invalid arguments, ProbeError if the source is not supported (see `probe`), and DecodeError
    if a frame does not decode.
    """
    _check_size(height, width)
    encoding = Encoding("ffv1") if is_mask else encoding
    begin, size = time.process_time(), _Size(height, width, bars)
    with open_video(source, limits) as video:
        table = read_packets(video)
        if video.is_image:
            make_timeline(table.timestamps, table.time_base, 1, start=start, num_frames=num_frames)
            data, extension, codec, psnr_y = _encode_image(video, table, size, encoding, is_mask, limits)
            spent = time.process_time() - begin
            return MadeClip(data, extension, codec, 1, 0.0, 0.0, width, height, psnr_y, spent)
        line = timeline or make_timeline(
            table.timestamps,
            table.time_base,
            table.last_duration,
            start=start,
            num_frames=num_frames,
            fps=None if fps is None else exact_rate(fps),
            usual_rate=video.stream.average_rate,
        )
        sound = find_window(source, video, table.timestamps[line.numbers[0]] * table.time_base, line, audio)

        def encode(encoding: Encoding) -> tuple[bytes, float]:
            make = partial(_encode_from, video, table, line, size, encoding, is_mask, sound, limits)
            return from_key_frame(table, line.numbers, make)

        data, psnr_y = _within(max_bytes, encode, encoding)
    return MadeClip(
        data=data,
        extension="mp4",
        codec=encoding.profile.codec,
        num_frames=len(line.numbers),
        fps=line.fps,
        duration_seconds=float(line.duration_seconds),
        width=width,
        height=height,
        psnr_y=psnr_y,
        encode_seconds=time.process_time() - begin,
        has_audio=sound is not None,
    )


def _within(
    max_bytes: float | None, encode: Callable[[Encoding], tuple[bytes, float]], encoding: Encoding
) -> tuple[bytes, float]:
    """Encode with decreasing quality until the clip has at most `max_bytes` or no lower quality is possible."""
    while True:
        data, psnr_y = encode(encoding)
        if max_bytes is None or len(data) <= max_bytes:
            return data, psnr_y
        if (smaller := encoding.smaller(len(data) / max_bytes)) is None:
            return data, psnr_y
        encoding = smaller


def _check_size(height: int, width: int) -> None:
    for name, value in (("height", height), ("width", width)):
        if not 16 <= value <= _MAX_SIDE or value % 2:
            raise ConfigError(f"{name}={value}: must be an even number from 16 to {_MAX_SIDE} in a native clip")


def _encode_from(
    video: VideoFile,
    table: PacketTable,
    timeline: Timeline,
    size: _Size,
    encoding: Encoding,
    is_mask: bool,
    sound: AudioWindow | None,
    limits: Limits,
    key: tuple[int, int],
) -> tuple[bytes, float]:
    """Decode the source, starting at a key packet, and encode it. Return (bytes of the clip, luma PSNR in decibels)."""
    numbers, written = timeline.numbers, 0
    made: list[tuple[Cover, ClipWriter]] = []

    def take(frame: VideoFrame, place: int) -> None:
        nonlocal written
        if not made:
            pixels = "gray" if is_mask else "yuv420p"
            cover = Cover(video, frame, *size, pixel_format="yuvj420p" if encoding.codec == "mjpeg" else pixels)
            made.append((cover, ClipWriter(encoding, timeline, size, cover.tags, pixels, sound)))
        cover, writer = made[0]
        if place != written:
            raise DecodeError(
                f"frame {numbers[place]} decodes before frame {numbers[written]}: the timestamps of the source are "
                "wrong; re-encode the source (ffmpeg -i IN OUT.mp4)"
            )
        while written < len(numbers) and numbers[written] == numbers[place]:
            writer.write(cover.picture(frame), written)
            written += 1

    try:
        decode_from(video, table, key, numbers, take)
        cover, writer = made[0]
        psnr_y = writer.finish()
    finally:
        for _, writer in made:
            writer.close()
    check_clip(writer.data, encoding, timeline, cover.tags, writer.meter.checksums, limits)
    if sound is not None:
        check_track(writer.data, sound)
    return writer.data, psnr_y


# MP4 of a clip.


class ClipWriter:
    """Encoder that writes an MP4 file in memory. The file depends only on the arguments, the pictures and the audio."""

    def __init__(
        self,
        encoding: Encoding,
        timeline: Timeline,
        size: _Size,
        tags: ColorTags,
        pixel_format: str,
        sound: AudioWindow | None = None,
    ) -> None:
        import av
        from av.bitstream import BitStreamFilterContext
        from av.codec.context import Flags

        # SVT-AV1 writes to standard error whatever FFmpeg's log level is.
        os.environ.setdefault("SVT_LOG", "0")
        self._timeline, self._sink = timeline, io.BytesIO()
        self._container = av.open(self._sink, "w", format="mp4", options=muxer_options(sound))
        self._stream = cast(
            "VideoStream",
            self._container.add_stream(encoding.profile.encoder, rate=_RATE, options=encoding.encoder_options()),
        )
        self._track = None if sound is None else AudioTrack(self._container, sound)
        encoder = self._stream.codec_context
        encoder.width = size.width
        encoder.height = size.height
        encoder.pix_fmt = pixel_format
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
        # This drops SEI units, in which x264 stores its version and settings, about 700 bytes per clip.
        is_h264 = encoding.codec == "h264"
        self._filter = BitStreamFilterContext("filter_units=remove_types=6", self._stream) if is_h264 else None
        self.meter = QualityMeter(encoding.profile.decoder, bytes(encoder.extradata or b""), size.height, size.width)

    def write(self, picture: VideoFrame, number: int) -> None:
        """Encode a picture as frame `number`."""
        self.meter.expect(number, picture)
        picture.pts, picture.time_base = number, Fraction(1, _RATE)
        self._mux(self._stream.codec_context.encode(picture))

    def finish(self) -> float:
        """Write the packets that the encoder held back, complete `data`, and return the luma PSNR in decibels."""
        self._mux(self._stream.codec_context.encode(None))
        if self._track is not None:
            self._track.write_until(None)
        self.close()
        return self.meter.finish()

    @property
    def data(self) -> bytes:
        return self._sink.getvalue()

    def close(self) -> None:
        self._container.close()

    def _mux(self, packets: list[Packet[VideoStream]]) -> None:
        for packet in packets:
            for kept in self._filter.filter(packet) if self._filter else [packet]:
                number = cast("int", kept.pts)
                self.meter.take(number, bytes(kept))
                kept.stream, kept.time_base = self._stream, self._timeline.time_base
                kept.pts = kept.dts = self._timeline.ticks[number]
                kept.duration = self._timeline.ticks_shown(number)
                if self._track is not None:
                    self._track.write_until((kept.pts + kept.duration) * self._timeline.time_base)
                self._container.mux_one(kept)


# Still images.


def _encode_image(
    video: VideoFile, table: PacketTable, size: _Size, encoding: Encoding, is_mask: bool, limits: Limits
) -> tuple[bytes, str, str, float]:
    """Encode a still image: a lossless PNG for the ffv1 codec, otherwise a JPEG with quantizer 2 (BT.601, full range).

    Return (contents, file extension, FFmpeg's name for the codec, luma PSNR in decibels).
    """
    import av
    from av.codec.context import Flags

    is_png = encoding.codec == "ffv1"
    codec, pixel_format = ("png", "gray" if is_mask else "rgb24") if is_png else ("mjpeg", "yuvj444p")
    frames: list[VideoFrame] = []
    decode_from(video, table, table.keys[0], [0], lambda frame, _: frames.append(frame))
    cover = Cover(video, frames[0], *size, pixel_format=pixel_format)
    picture = cover.picture(frames[0])
    encoder = cast("VideoCodecContext", av.CodecContext.create(codec, "w"))
    encoder.height, encoder.width = size.height, size.width
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
        meter = QualityMeter(codec, b"", size.height, size.width)
        meter.expect(0, picture)
        meter.take(0, data)
        psnr_y, checksum = meter.finish(), meter.checksums[0]
    _check_image(data, codec, checksum, limits)
    return data, "png" if is_png else "jpg", codec, psnr_y


def _check_image(data: bytes, codec: str, checksum: int, limits: Limits) -> None:
    """Raise DecodeError unless `data` is a single image with the given codec and picture checksum."""
    try:
        with open_video(data, limits) as video:
            is_right = video.is_image and video.codec_name == codec and len(read_packets(video).timestamps) == 1
            checksums = [picture_checksum(frame) for frame in decoded(video, "the image cannot be decoded")]
            if not is_right or checksums != [checksum]:
                raise DecodeError("the decoded picture differs from the encoded picture")
    except (DecodeError, ProbeError) as error:
        raise DecodeError(f"the written image differs from what was encoded: {error}") from error
