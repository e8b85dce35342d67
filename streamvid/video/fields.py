"""Frames whose two fields arrive as separate packets, as in H.264 transport streams of camcorders (AVCHD).

Both fields are joined into the packet that MP4 and Matroska would store, so that a packet is one frame everywhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, cast

from streamvid.video.bitstream.h264 import Field, FieldReader

if TYPE_CHECKING:
    from av.packet import Packet
    from av.video.stream import VideoStream

_SPLITTING_CONTAINERS = frozenset({"mpegts", "mpeg"})


def separates_fields(container: str, codec: str) -> bool:
    """Return whether packets of this codec in this container must be passed through `join_fields`."""
    return container in _SPLITTING_CONTAINERS and codec == "h264"


def join_fields(packets: Iterable[Packet[VideoStream]], stream: VideoStream) -> Iterator[Packet[VideoStream]]:
    """Yield the packets in order, with the two fields of each frame joined into one packet."""
    reader = FieldReader(stream.codec_context.extradata or b"")
    first: tuple[Packet[VideoStream], Field] | None = None
    for packet in packets:
        field = reader.read(memoryview(packet))
        if first is not None:
            if field is not None and field.is_second_of(first[1]):
                yield _joined(first[0], packet)
                first = None
                continue
            yield first[0]
        first = None if field is None else (packet, field)
        if first is None:
            yield packet
    if first is not None:
        yield first[0]


def _joined(first: Packet[VideoStream], second: Packet[VideoStream]) -> Packet[VideoStream]:
    from av.packet import Packet

    data = bytes(first) + bytes(second)
    # Packet(data) would share memory without the zeros behind it that decoders read.
    joined = cast("Packet[VideoStream]", Packet(len(data)))
    joined.update(data)
    joined.pts, joined.dts, joined.time_base = first.pts, first.dts, first.time_base
    joined.duration = (first.duration or 0) + (second.duration or 0)
    joined.is_keyframe = first.is_keyframe
    joined.is_corrupt = first.is_corrupt or second.is_corrupt
    return joined
