"""All frames of a stretch of a video, in order, each proved by its timestamp: what is left out is an error."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from streamvid.errors import DecodeError, ProbeError
from streamvid.video.container import VideoFile, ffmpeg_errors
from streamvid.video.packets import PacketTable, each_packet

if TYPE_CHECKING:
    from av.video.frame import VideoFrame

_MAX_REORDER_DEPTH = 16


def frames_between(
    video: VideoFile, table: PacketTable, key: tuple[int, int], first: int, last: int
) -> Iterator[tuple[int, VideoFrame]]:
    """(frame number, decoded frame) for `first` to `last`, decoded from the key packet `key`, one of `decode_starts`.

    Raises DecodeError at the first frame that is damaged, missing or out of place.
    """
    key_time, key_ordinal = key
    expected = iter(range(first, last + 1))
    number = next(expected)
    times = table.timestamps
    for frame in _decoded(video, table, key_ordinal, max(table.ordinals[first : last + 1])):
        # Frames shown before the key frame may lean on pictures before it: broken, but not ours.
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
