"""Presentation times of pictures in AVI, which stores only the order of decoding.

The ffmpeg program does not need these times, because decoders return pictures in display order. This package finds
windows by the times of packets, so it assigns presentation times to them. Pictures between two points at which
decode order and display order coincide form a group. The times of a group are sorted, and assigned in display order,
which the codec's own headers determine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from streamvid.errors import ProbeError
from streamvid.video.bitstream import h264
from streamvid.video.bitstream.entries import is_mpeg4_b_picture

if TYPE_CHECKING:
    from av.packet import Packet
    from av.video.stream import VideoStream

_MAX_GROUP_BYTES = 1 << 28


def stores_decode_times(container: str, codec: str) -> bool:
    """Return whether packets of this codec in this container must be passed through `display_times`."""
    return container == "avi" and codec in _GROUPS


def display_times(
    packets: Iterable[Packet[VideoStream]], stream: VideoStream, codec: str
) -> Iterator[Packet[VideoStream]]:
    """Yield packets in decode order, with presentation times. Each packet contains one picture.

    Raises ProbeError if a group of pictures is too large to hold in memory.
    """
    split, order = _GROUPS[codec]
    group: list[Packet[VideoStream]] = []
    header, num_bytes = stream.codec_context.extradata or b"", 0
    for packet in _unpacked(packets, stream) if codec == "mpeg4" else packets:
        if group and split(memoryview(packet), header):
            yield from _timed(group, order(group, stream))
            group, num_bytes = [], 0
        group.append(packet)
        num_bytes += packet.size
        if num_bytes > _MAX_GROUP_BYTES:
            raise ProbeError(
                f"a group of pictures is larger than {_MAX_GROUP_BYTES} bytes, the limit for AVI files; "
                "re-encode the file (ffmpeg -i IN OUT.mp4)",
                kind="limit",
            )
    yield from _timed(group, order(group, stream))


def _unpacked(packets: Iterable[Packet[VideoStream]], stream: VideoStream) -> Iterator[Packet[VideoStream]]:
    """Yield the packets of an MPEG-4 stream with exactly one picture per packet.

    DivX and Xvid may store two pictures in one packet, followed by an empty packet. The second picture is moved to the
    empty packet."""
    from av.bitstream import BitStreamFilterContext

    unpack = BitStreamFilterContext("mpeg4_unpack_bframes", stream)
    for packet in packets:
        yield from unpack.filter(packet)
    yield from unpack.filter(None)


def _timed(group: list[Packet[VideoStream]], order: list[int]) -> list[Packet[VideoStream]]:
    times = [packet.pts for packet in group if packet.pts is not None]
    if len(times) == len(group) == len(order):
        for number, time in zip(order, sorted(times), strict=True):
            group[number].pts = time
    return group


def _mpeg4_order(group: list[Packet[VideoStream]], _stream: VideoStream) -> list[int]:
    """Return the display order: the B-pictures, then the reference picture that precedes them in decode order."""
    return [*range(1, len(group)), 0][: len(group)]


def _h264_order(group: list[Packet[VideoStream]], stream: VideoStream) -> list[int]:
    """Return the display order, which follows the picture order counts that FFmpeg's dts2pts filter reads.

    These counts can be compared only within a coded sequence.
    """
    from av.bitstream import BitStreamFilterContext
    from av.packet import Packet

    counts, times = BitStreamFilterContext("dts2pts", stream), []
    for number, packet in enumerate(group):
        copy = Packet(bytes(packet))  # the filter takes what it is given
        copy.dts, copy.duration = number, 1
        times += [found.pts for found in counts.filter(copy)]
    times += [found.pts for found in counts.filter(None)]
    return sorted(range(len(times)), key=lambda number: (times[number] is None, times[number] or 0))


_GROUPS: dict[
    str,
    tuple[
        Callable[[memoryview, bytes], bool],
        Callable[[list[Packet[VideoStream]], VideoStream], list[int]],
    ],
] = {
    "h264": (h264.is_idr, _h264_order),
    "mpeg4": (lambda packet, header: not is_mpeg4_b_picture(packet), _mpeg4_order),
}
