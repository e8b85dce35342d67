"""Chosen frames of a video, by their timestamps, into the caller's memory.

A frame is the right one only if its timestamp equals the one that the packets promise: "the first at or after" would
silently hand on shifted frames where some do not decode. Decoding starts at the last key frame that serves, pictures
that nothing refers to are skipped, and reading stops at the packet of the last frame wanted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from streamvid.errors import ConfigError, DecodeError, ProbeError
from streamvid.video.container import Source, VideoFile, ffmpeg_errors, open_video
from streamvid.video.convert import FrameConverter
from streamvid.video.frame_format import read_frame_format
from streamvid.video.limits import LIMITS, Limits
from streamvid.video.packets import PacketTable, each_packet, read_packets
from streamvid.video.transform import Transform

if TYPE_CHECKING:
    from av.packet import Packet
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

#: Codecs where "refers to nothing" is said by each picture itself. HEVC says it within a temporal layer only; AV1's
#: decoder loses frames when told to skip.
_SKIPPING_CODECS = frozenset({"h264", "mpeg4", "mpeg2video", "mpeg1video", "vp8"})
_MAX_REORDER_DEPTH = 16


def decode_into(
    source: Source,
    start: int,
    out: NDArray[np.uint8],
    *,
    num_frames: int | None = None,
    limits: Limits = LIMITS,
) -> None:
    """Decode len(out) consecutive frames, in presentation order from frame number `start`, into `out`.

    source: bytes or a buffer (read in place), a path, or a seekable binary file. An image is a video of one frame.
    out: (T, H, W, 3), uint8, C-contiguous and writeable, T >= 1; frames are scaled to cover (H, W) and centre-cropped
    (`Transform.cover`), turned upright, RGB.
    num_frames: how many frames the video is known to have, None to not check it.

    Raises DecodeError if the source has other frames than promised or one does not decode (then what `out` holds is
    undefined), ConfigError if `start` or `out` cannot be. Damage that a codec has no means to notice (VP9, AV1 and HEVC
    have few) comes out as damaged pixels: checksums are the guard against that. One thread; nothing is kept between
    calls.
    """
    _check_arguments(start, out)
    try:
        with open_video(source, limits) as video:
            _decode_window(video, start, out, num_frames)
    except ProbeError as error:
        raise DecodeError(str(error)) from error


def _check_arguments(start: int, out: NDArray[np.uint8]) -> None:
    if out.dtype != np.uint8 or out.ndim != 4 or out.shape[3] != 3 or not out.size:
        raise ConfigError(f"out is {out.dtype} of shape {out.shape}, it must be uint8 of shape (T, H, W, 3), not empty")
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise ConfigError("out must be C-contiguous and writeable")
    if start < 0:
        raise ConfigError(f"start is {start}, it must be 0 or more")


def _decode_window(video: VideoFile, start: int, out: NDArray[np.uint8], num_frames: int | None) -> None:
    table = read_packets(video)
    stop = start + len(out)
    if num_frames is not None and num_frames != len(table.timestamps):
        raise DecodeError(f"the video has {len(table.timestamps)} frames, {num_frames} were promised")
    if stop > len(table.timestamps):
        raise DecodeError(f"frames {start} to {stop - 1} are wanted, the video has {len(table.timestamps)}")
    _decode_from_either(video, table, start, out)


def _decode_from_either(video: VideoFile, table: PacketTable, start: int, out: NDArray[np.uint8]) -> None:
    problem: DecodeError | None = None
    try:
        for key_time, key_ordinal in table.decode_starts(start, start + len(out) - 1):
            window = _Window(video, table, start, out, key_time)
            try:
                window.decode(_packets_from(video, table, key_ordinal))
                return
            except DecodeError as error:
                problem = problem or error
            except ProbeError as error:
                problem = problem or DecodeError(str(error))
        raise problem or DecodeError(f"no key frame comes before frame {start}: it cannot be decoded")
    finally:
        # An error and the variable that names it hold each other, and with them the decoder and all its pictures.
        del problem


class _Window:
    """One attempt at the wanted frames."""

    def __init__(self, video: VideoFile, table: PacketTable, start: int, out: NDArray[np.uint8], key_time: int) -> None:
        stop = start + len(out)
        self._video, self._table, self._start, self._out, self._key_time = video, table, start, out, key_time
        self._missing = {table.timestamps[number]: number - start for number in range(start, stop)}
        self._wanted_ordinals = set(table.ordinals[start:stop])
        self._converter: FrameConverter | None = None

    def decode(self, packets: Iterator[tuple[int, Packet[VideoStream]]]) -> None:
        """Feed `packets` until every wanted frame has come out; DecodeError if one does not."""
        to_feed = set(self._wanted_ordinals)
        can_skip: bool | None = None
        for ordinal, packet in packets:
            decoder = self._video.decoder
            if can_skip is None:
                can_skip = _can_skip(self._video)
                if self._video.codec_name == "h264":
                    # A decoder that starts in the middle must not have to find out by losing frames.
                    depth = max(decoder.reorder_depth, self._table.reorder_depth)
                    decoder.reorder_depth = min(depth, _MAX_REORDER_DEPTH)
            decoder.skip_frame = "NONREF" if can_skip and ordinal not in self._wanted_ordinals else "DEFAULT"
            self._take(packet)
            to_feed.discard(ordinal)
            if not to_feed:
                break
        if self._missing:
            self._take(None)
        if self._missing:
            numbers = sorted(self._start + slot for slot in self._missing.values())
            raise DecodeError(f"frames {_brief(numbers)} do not decode: damaged data, or timestamps that lie")

    def _take(self, packet: Packet[VideoStream] | None) -> None:
        with ffmpeg_errors(f"the video does not decode near {self._place(packet)}"):
            frames = self._video.decoder.decode(packet)
            for frame in frames:
                self._place_frame(frame)

    def _place_frame(self, frame: VideoFrame) -> None:
        # Frames shown before the key frame may lean on pictures before it: broken, but not ours.
        if frame.is_corrupt and (frame.pts is None or frame.pts >= self._key_time):
            raise DecodeError(f"the video is damaged: the frame at timestamp {frame.pts} does not decode cleanly")
        if frame.pts not in self._missing:
            return
        slot = self._missing.pop(frame.pts)
        if self._converter is None:
            frame_format = read_frame_format(self._video, frame)
            transform = Transform.cover(frame_format, self._out.shape[1], self._out.shape[2])
            self._converter = FrameConverter(frame, frame_format, transform)
        self._converter.convert(frame, self._out[slot])

    def _place(self, packet: Packet[VideoStream] | None) -> str:
        return "its end" if packet is None else f"timestamp {packet.pts}"


def _can_skip(video: VideoFile) -> bool:
    if video.codec_name == "hevc":
        # The hvcC header counts temporal layers; with one, "refers to nothing within the layer" is all there is.
        header = video.decoder.extradata or b""
        return len(header) > 21 and header[0] == 1 and header[21] >> 3 & 0b111 == 1
    return video.codec_name in _SKIPPING_CODECS


def _packets_from(video: VideoFile, table: PacketTable, ordinal: int) -> Iterator[tuple[int, Packet[VideoStream]]]:
    """(ordinal, packet) from the given one on: seeks where that is trusted and proves right, else reads on to it."""
    if video.is_exact:
        with ffmpeg_errors("the file cannot be sought in"):
            video.container.seek(table.rows[ordinal][0] or 0, stream=video.stream)
        packets = each_packet(video)
        first = next(packets, None)
        if first is not None and _row(first) == table.rows[ordinal]:
            yield ordinal, first
            yield from _recognised(packets, table, ordinal + 1)
            return
    video.reopen()
    for number, packet in _recognised(each_packet(video), table, 0):
        if number >= ordinal:
            yield number, packet


def _recognised(
    packets: Iterator[Packet[VideoStream]], table: PacketTable, first: int
) -> Iterator[tuple[int, Packet[VideoStream]]]:
    for number, (packet, row) in enumerate(zip(packets, table.rows[first:], strict=False), start=first):
        if _row(packet) != row:
            raise DecodeError(f"packet {number} of the video is another one when read again: the source changed")
        yield number, packet


def _row(packet: Packet[VideoStream]) -> tuple[int | None, int | None, int]:
    return packet.pts, packet.pos, packet.size


def _brief(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown} and {len(numbers) - 8} more" if len(numbers) > 8 else shown
