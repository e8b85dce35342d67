"""Index of a clip's packets, for decoding a window from part of the clip's bytes without the container.

Packets are in decode order. They are grouped into segments: one starts at every key packet, and at every 32nd packet
after it. Segments are read as a whole, and each has a checksum.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from streamvid.errors import DecodeError
from streamvid.video.container import open_video
from streamvid.video.limits import LIMITS, Limits
from streamvid.video.packets import PacketTable, read_packets
from streamvid.video.probe import first_frame
from streamvid.video.stream_info import MAX_EXTRADATA_BYTES, StreamInfo

if TYPE_CHECKING:
    from av.packet import Packet
    from av.video.stream import VideoStream

KEY, SHOWN = 1, 2
"""Flag bits of a packet. KEY: decoding can start at this packet. SHOWN: the packet is a displayed frame of the clip."""

CHECKSUM_BYTES = 8
_MAX_BYTES = 1 << 62  # the sum of two values fits in an int64
_SEGMENT_PACKETS = 32
_SEARCH_BYTES = 1024  # a Matroska block's header precedes its data

#: Codecs whose decoders need nothing from the container except the fields of StreamInfo.
CODECS = frozenset({"h264", "hevc", "vp8", "vp9", "av1", "mjpeg", "ffv1"})

Int64s = npt.NDArray[np.int64]


@dataclass(eq=False)
class PacketWindow:
    """Packets needed to decode a window of frames, and the byte range that they occupy in the clip.

    - first_byte, num_bytes: the byte range.
    - pieces: (start, end, checksum) for each segment, with start and end relative to `first_byte`.
    - packets: table of shape (n, 4) with one row per packet. The columns are the timestamp, the offset from
      `first_byte`, the size in bytes, and the output slot (-1 for none).
    - key_time: timestamp of the first packet.
    """

    first_byte: int
    num_bytes: int
    pieces: tuple[tuple[int, int, bytes], ...]
    packets: Int64s
    key_time: int


@dataclass(frozen=True, eq=False, slots=True)
class Facts:
    """Properties derived from a clip's packets.

    - segments: index of each packet's segment.
    - num_bytes: end offset of the last packet.
    - lows, highs: start and end offsets of each segment, in bytes.
    - keys: indices of the key packets.
    - is_sequential: True if every packet is a displayed frame, in ascending order of time.
    """

    segments: Int64s
    lows: Int64s
    highs: Int64s
    keys: Int64s
    num_bytes: int
    is_sequential: bool


def facts_of(
    times: Int64s, offsets: Int64s, sizes: Int64s, flags: npt.NDArray[np.uint8], edges: Int64s
) -> list[Facts | None]:
    """Return the Facts for each of several clips, with None for a clip whose packets are missing or invalid.

    The arrays contain the packets of all clips. Clip i consists of packets edges[i] to edges[i + 1] (exclusive).
    """
    places, starts, counts = np.arange(len(flags)), edges[:-1], np.diff(edges)
    is_first = np.zeros(len(flags), np.bool_)
    is_first[starts[counts > 0]] = True
    is_key = (flags & KEY) > 0
    last_keys = np.maximum.accumulate(np.where(is_key, places, 0))
    begins = is_first | ((places - last_keys) % _SEGMENT_PACKETS == 0)
    segments, firsts = np.cumsum(begins) - 1, np.flatnonzero(begins)
    is_right = (sizes >= 1) & (sizes < _MAX_BYTES) & (offsets >= 0) & (offsets < _MAX_BYTES)
    is_right &= ~is_first | is_key
    is_next = is_first | (np.diff(times, prepend=times[:1]) > 0)
    is_next &= (flags & SHOWN) > 0
    lows, highs = np.minimum.reduceat(offsets, firsts), np.maximum.reduceat(offsets + sizes, firsts)
    keys = np.flatnonzero(is_key)
    key_edges = np.searchsorted(keys, edges)
    found: list[Facts | None] = []
    for number, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        mine = slice(start, start + count)
        if count and is_right[mine].all():
            first, last = segments[start], segments[start + count - 1]
            own = slice(first, last + 1)
            is_sequential = bool(is_next[mine].all())
            own_keys = keys[key_edges[number] : key_edges[number + 1]] - start
            num_bytes = int(highs[own].max())
            found.append(Facts(segments[mine] - first, lows[own], highs[own], own_keys, num_bytes, is_sequential))
        else:
            found.append(None)
    return found


@dataclass(eq=False)
class ClipIndex:
    """Index of all packets in a clip, in decode order.

    - info: description of the stream.
    - times, offsets, sizes, flags: timestamp, offset and size in bytes, and flags (KEY, SHOWN) of each packet.
    - checksums: array of shape (number of segments, 8) with the first 8 bytes of the SHA-256 of each segment.
    - facts: result of `facts_of` for these packets; computed if omitted.
    - time_base: seconds per tick of the timestamps; None if unknown.

    Raises DecodeError if the packets are invalid or the number of checksums is wrong.
    """

    info: StreamInfo
    times: Int64s
    offsets: Int64s
    sizes: Int64s
    flags: npt.NDArray[np.uint8]
    checksums: npt.NDArray[np.uint8]
    facts: Facts = None  # type: ignore[assignment]  # computed below if not given
    time_base: Fraction | None = None

    def __post_init__(self) -> None:
        facts: Facts | None = self.facts
        if facts is None:
            lengths = {len(self.times), len(self.offsets), len(self.sizes), len(self.flags)}
            whole = np.array([0, len(self.times)])
            facts = facts_of(self.times, self.offsets, self.sizes, self.flags, whole)[0] if len(lengths) == 1 else None
            object.__setattr__(self, "facts", facts)
        if facts is None or self.checksums.shape != (int(facts.segments[-1]) + 1, CHECKSUM_BYTES):
            raise DecodeError("the packet index is invalid; copy the dataset again")

    @property
    def segments(self) -> Int64s:
        """Segment index of each packet."""
        return self.facts.segments

    @cached_property
    def _order(self) -> Int64s:
        shown = np.flatnonzero(self.flags & SHOWN)
        return shown[np.argsort(self.times[shown])]

    @property
    def num_frames(self) -> int:
        """Number of frames in the clip."""
        return len(self.times) if self.facts.is_sequential else len(self._order)

    @property
    def num_bytes(self) -> int:
        """End offset, in bytes, of the last packet. A valid clip is at least this large."""
        return self.facts.num_bytes

    @property
    def frame_times(self) -> Int64s:
        """Timestamps of all frames, in ascending order."""
        return self.times if self.facts.is_sequential else self.times[self._order]

    def window(self, start: int, num_frames: int, stride: int = 1) -> PacketWindow:
        """Return the packets needed to decode `num_frames` frames, `stride` frames apart, starting at frame `start`.

        Raises the same errors as `window_of`, and DecodeError if `num_frames` or `stride` is below 1.
        """
        if stride < 1 or num_frames < 1:
            raise DecodeError(f"num_frames is {num_frames} and stride is {stride}; both must be at least 1")
        return self.window_of(range(start, start + num_frames * stride, stride))

    def window_of(self, numbers: Sequence[int]) -> PacketWindow:
        """Return the packets needed to decode the frames `numbers`, which must be in ascending order.

        A repeated frame is assigned only to its first output slot.
        Raises DecodeError if the clip has fewer frames, no usable key packet, or two packets with the same timestamp.
        """
        slots = _places(len(numbers))
        distinct: range | Int64s
        if isinstance(numbers, range) and numbers.step > 0:  # nearly all are, and this takes a third of the time
            distinct = numbers
        else:
            distinct = np.asarray(numbers, np.int64)
            if (distinct[1:] <= distinct[:-1]).any():
                distinct, slots = np.unique(distinct, return_index=True)
        if not 0 <= distinct[0] <= distinct[-1] < self.num_frames:
            raise DecodeError(
                f"frames {distinct[0]} to {distinct[-1]} were requested, but the clip has {self.num_frames} frames"
            )
        first, last, wanted = self._span(distinct)
        pieces, low, high = self._pieces(int(self.segments[first]), int(self.segments[last]))
        packets = np.empty((last + 1 - first, 4), np.int64)
        packets[:, 0] = self.times[first : last + 1]
        packets[:, 1] = self.offsets[first : last + 1] - low
        packets[:, 2] = self.sizes[first : last + 1]
        packets[:, 3] = -1
        packets[wanted, 3] = slots
        return PacketWindow(low, high - low, pieces, packets, int(self.times[first]))

    def _span(self, numbers: range | Int64s) -> tuple[int, int, slice | Int64s]:
        """Return the indices of the first and last packets to decode, and of the packets of the frames `numbers`.

        The indices in the third item are relative to the first packet to decode.
        """
        keys = self.facts.keys
        if self.facts.is_sequential:
            first = int(keys[bisect_right(keys, int(numbers[0])) - 1])
            if isinstance(numbers, range):  # NumPy copies to a slice in a fifth of the time
                return first, numbers[-1], slice(numbers.start - first, numbers.stop - first, numbers.step)
            return first, int(numbers[-1]), numbers - first
        places = slice(numbers.start, numbers.stop, numbers.step) if isinstance(numbers, range) else numbers
        wanted = self._order[places]
        usable = keys[(keys <= wanted.min()) & (self.times[keys] <= self.times[wanted[0]])]
        if not len(usable):
            raise DecodeError(
                f"the packet index has no key frame for timestamp {self.times[wanted[0]]}; copy the dataset again"
            )
        first, last = int(usable[-1]), int(wanted.max())
        if len({*self.times[first : last + 1].tolist()}) < last + 1 - first:
            # The loop in window.py identifies frames by their times alone.
            raise DecodeError("two packets have the same timestamp in the packet index; copy the dataset again")
        return first, last, wanted - first

    def _pieces(self, first: int, last: int) -> tuple[tuple[tuple[int, int, bytes], ...], int, int]:
        mine = slice(first, last + 1)
        lows, highs = self.facts.lows[mine].tolist(), self.facts.highs[mine].tolist()
        low, checksums = min(lows), self.checksums[mine].tobytes()
        pieces = tuple(
            (begin - low, end - low, checksums[place : place + CHECKSUM_BYTES])
            for place, begin, end in zip(range(0, len(checksums), CHECKSUM_BYTES), lows, highs, strict=True)
        )
        return pieces, low, max(highs)


# numpy.arange and numpy.searchsorted release the GIL, which costs the thread its turn if others wait for it.
@lru_cache(maxsize=64)
def _places(count: int) -> Int64s:
    places = np.arange(count)
    places.flags.writeable = False
    return places


def checksum(data: bytes | memoryview) -> bytes:
    """Return the checksum of a segment's bytes."""
    return hashlib.sha256(data).digest()[:CHECKSUM_BYTES]


def index_clip(data: bytes, limits: Limits = LIMITS) -> ClipIndex | None:
    """Return the packet index of a clip that `probe` accepts, or None if decoding requires the container.

    The container is required for images, for packets that are not stored whole and unchanged in the file (transport
    streams, stripped headers) or may contain another packet's picture (AVI), and for decoders that need more data (such
    as headers that change within the clip). Raises ProbeError if the file is not a video.
    """
    with open_video(data, limits) as video:
        decoder = video.decoder
        color = (decoder.colorspace, decoder.color_range, decoder.color_primaries, decoder.color_trc)
        extradata = decoder.extradata or b""
        if video.is_image or video.codec_name not in CODECS or len(extradata) > MAX_EXTRADATA_BYTES:
            return None
        places = _Places(memoryview(data))
        table = read_packets(video, places.add if video.is_exact else None)
        offsets = places.offsets(table)
        if offsets is None:
            return None
        frame, _ = first_frame(video, table)
        info = StreamInfo(
            codec=video.codec_name,
            extradata=extradata,
            coded_width=frame.coded_width,
            coded_height=frame.coded_height,
            pixel_format=frame.pixel_format,
            sample_aspect_ratio=frame.sample_aspect_ratio,
            rotation=frame.rotation,
            flip=frame.flip,
            color=color,
            reorder_depth=max(table.reorder_depth, video.decoder.reorder_depth),
            margins=frame.margins,
            x264_core=table.x264_core,
        )
    return _make_index(info, table, offsets, data)


def _make_index(info: StreamInfo, table: PacketTable, offsets: Int64s, data: bytes) -> ClipIndex | None:
    times = np.array([row[0] for row in table.rows], np.int64)
    sizes = np.array([row[2] for row in table.rows], np.int64)
    flags = np.zeros(len(times), np.uint8)
    flags[[ordinal for _, ordinal in table.keys]] |= KEY
    flags[list(table.ordinals)] |= SHOWN
    # Packets before the first key packet are never decoded.
    first = table.keys[0][1]
    parts = (times[first:], offsets[first:], sizes[first:], flags[first:])
    facts = facts_of(*parts, np.array([0, len(parts[0])]))[0]
    assert facts is not None
    lows, highs = facts.lows, facts.highs
    if (highs - lows).sum() > 2 * len(data):
        return None  # the packets are so scattered that segments would mostly span other data
    view = memoryview(data)
    digests = b"".join(checksum(view[low:high]) for low, high in zip(lows.tolist(), highs.tolist(), strict=True))
    checksums = np.frombuffer(digests, np.uint8).reshape(-1, CHECKSUM_BYTES)
    return ClipIndex(info, *parts, checksums, facts, table.time_base)


class _Places:
    """Recorder for the offsets, in the file `data`, of the packets passed to `add`."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._offsets, self._are_stored = data, list[int](), True

    def add(self, packet: Packet[VideoStream]) -> None:
        """Find the next packet in the file.

        Stop searching after the first packet whose stored bytes differ from the original.
        """
        offset = stored_offset(packet, self._data) if self._are_stored else -1
        self._are_stored = offset >= 0 and not packet.has_sidedata("new_extradata")
        self._offsets.append(offset)

    def offsets(self, table: PacketTable) -> Int64s | None:
        """Return the file offset of each packet, or None if a packet was changed or two packets share a timestamp."""
        times = {row[0] for row in table.rows}
        if None in times or len(times) < len(table.rows) or not self._are_stored or not self._offsets:
            return None
        return np.array(self._offsets, np.int64)


def stored_offset(packet: Packet[Any], data: memoryview) -> int:
    """Return the offset of a packet's unchanged bytes in a file, or -1 if they are not stored in it."""
    content, position = bytes(packet), packet.pos
    if position is None or position < 0:
        return -1
    if data[position : position + len(content)] == content:
        return position
    found = bytes(data[position : position + len(content) + _SEARCH_BYTES]).find(content)
    return position + found if found >= 0 else -1
