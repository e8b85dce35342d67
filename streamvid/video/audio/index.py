"""Index of a clip's audio packets, for decoding a window from part of the clip's bytes without the container.

Packets are in decode order. A segment is a run of up to 32 packets that are stored next to each other. Segments are
read as a whole, and each has a checksum.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from streamvid.errors import DecodeError
from streamvid.video.audio.canvas import needed_span
from streamvid.video.audio.codecs import INDEXED_CODECS, can_start_anywhere, preroll
from streamvid.video.audio.convergence import short_preroll
from streamvid.video.audio.samples import Piece, audio_packets, decode_pieces
from streamvid.video.audio.stream import AudioStreamInfo, audio_stream, info_of
from streamvid.video.clip_index import CHECKSUM_BYTES, checksum, stored_offset
from streamvid.video.container import open_audio
from streamvid.video.limits import LIMITS, Limits

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.packet import Packet

Int64s = npt.NDArray[np.int64]

_SEGMENT_PACKETS = 32
_MAX_BETWEEN = 64  # a Matroska block's header
_MAX_VALUE = 1 << 62  # the sum of two values fits in an int64


@dataclass(frozen=True, eq=False)
class AudioPackets:
    """Packets needed to decode a window of audio, and the byte range that they occupy in the clip.

    - first_byte, num_bytes: the byte range; num_bytes is 0 if the clip has no audio in the window.
    - pieces: (start, end, checksum) for each segment, with start and end relative to `first_byte`.
    - packets: table of shape (n, 5) with one row per packet. The columns are the position of the first kept sample (at
      the stream's rate), the offset from `first_byte`, the size in bytes, the number of samples to cut from the start,
      and the number of samples to keep (0 if the packet is decoded only because later packets depend on it).
    """

    first_byte: int
    num_bytes: int
    pieces: tuple[tuple[int, int, bytes], ...]
    packets: Int64s


NO_PACKETS = AudioPackets(0, 0, (), np.zeros((0, 5), np.int64))


@dataclass(frozen=True, eq=False)
class AudioIndex:
    """Index of all audio packets in a clip, in decode order.

    - info: description of the stream.
    - positions: timeline position of each packet's first kept sample, in samples at `info.sample_rate`.
    - offsets, sizes: offset and size of each packet in the clip, in bytes.
    - heads, counts: number of decoded samples to cut from the start of each packet, and number of samples to keep after
      the cut.
    - checksums: array of shape (number of segments, 8) with the first 8 bytes of the SHA-256 of each segment.

    Raises DecodeError if the packets are invalid or the number of checksums is wrong.
    """

    info: AudioStreamInfo
    positions: Int64s
    offsets: Int64s
    sizes: Int64s
    heads: Int64s
    counts: Int64s
    checksums: npt.NDArray[np.uint8]

    def __post_init__(self) -> None:
        columns = (self.positions, self.offsets, self.sizes, self.heads, self.counts)
        is_right = len({len(column) for column in columns}) == 1 and len(self.positions) > 0
        is_right = is_right and all(bool((abs(column) < _MAX_VALUE).all()) for column in columns)
        is_right = is_right and min(self.offsets.min(), self.heads.min(), self.counts.min(), self.sizes.min() - 1) >= 0
        if not is_right or self.checksums.shape != (len(self._edges) - 1, CHECKSUM_BYTES):
            raise DecodeError("the audio packet index is invalid; copy the dataset again")

    @cached_property
    def _edges(self) -> Int64s:
        """Ordinal of the first packet in each segment, followed by the number of packets."""
        return _segment_edges(self.offsets, self.sizes)

    def from_first_sample(self) -> AudioIndex:
        """Return a copy of this index whose positions are relative to the first sample (see `own_zero`)."""
        return replace(self, positions=self.positions - self.positions[int(np.argmax(self.counts > 0))])

    @property
    def num_bytes(self) -> int:
        """End offset of the last packet, in bytes."""
        return int((self.offsets + self.sizes).max())

    def window(self, first_sample: int, num_samples: int, sample_rate: int) -> AudioPackets:
        """Return the packets needed to decode a window of `num_samples` delivered samples.

        first_sample: position of the first delivered sample, counted at `sample_rate`.
        sample_rate: sample rate of the delivered audio, in Hz.
        """
        span = needed_span(first_sample, num_samples, sample_rate, self.info.sample_rate)
        begins, ends = self.positions, self.positions + self.counts
        wanted = np.flatnonzero((begins < span.stop) & (ends > span.first) & (self.counts > 0))
        if not len(wanted):
            return NO_PACKETS
        first, last = self._start(int(wanted[0])), int(wanted[-1])
        places = slice(first, last + 1)
        pieces, low, high = self._pieces(first, last)
        packets = np.empty((last + 1 - first, 5), np.int64)
        packets[:, 0] = self.positions[places]
        packets[:, 1] = self.offsets[places] - low
        packets[:, 2] = self.sizes[places]
        packets[:, 3] = self.heads[places]
        packets[:, 4] = 0
        packets[wanted - first, 4] = self.counts[wanted]
        return AudioPackets(low, high - low, pieces, packets)

    def _start(self, first: int) -> int:
        """Return the packet at which decoding must start for packet `first` to decode correctly."""
        info = self.info
        num_samples, num_packets = preroll(info.codec, info.extradata, info.sample_rate)
        num_samples = num_samples if info.preroll is None else info.preroll
        start = max(0, first - num_packets)
        while start > 0 and self.positions[start] > self.positions[first] - num_samples:
            start -= 1
        return start

    def _pieces(self, first: int, last: int) -> tuple[tuple[tuple[int, int, bytes], ...], int, int]:
        edges = self._edges
        begin, stop = int(np.searchsorted(edges, first, "right")) - 1, int(np.searchsorted(edges, last, "right"))
        firsts, lasts = edges[begin:stop], edges[begin + 1 : stop + 1] - 1
        # Within a segment, packets are stored in this order.
        starts, ends = self.offsets[firsts], self.offsets[lasts] + self.sizes[lasts]
        low, high = int(starts.min()), int(ends.max())
        sums = self.checksums[begin:stop].tobytes()
        places = zip((starts - low).tolist(), (ends - low).tolist(), strict=True)
        pieces = tuple(
            (start, end, sums[at : at + CHECKSUM_BYTES])
            for at, (start, end) in zip(range(0, len(sums), CHECKSUM_BYTES), places, strict=True)
        )
        return pieces, low, high


def _segment_edges(offsets: Int64s, sizes: Int64s) -> Int64s:
    gaps = offsets[1:] - (offsets + sizes)[:-1]
    apart = np.flatnonzero((gaps < 0) | (gaps > _MAX_BETWEEN)) + 1
    starts = np.concatenate([[0], apart])
    places = np.arange(len(offsets)) - np.repeat(starts, np.diff(starts, append=len(offsets)))  # within the run
    return np.append(np.flatnonzero(places % _SEGMENT_PACKETS == 0), len(offsets)).astype(np.int64)


def index_audio(data: bytes, limits: Limits = LIMITS, see: Callable[[Piece], None] | None = None) -> AudioIndex | None:
    """Return an index of a clip's audio packets, or None if there is no audio or decoding requires the container.

    The container is required if packets are not stored whole and unchanged in the file (transport streams), if the
    decoder needs more data from the container, or if the sample rate or the codec header changes.
    All audio is decoded once, because only decoding shows how many samples each packet contains.

    see: function (such as `FactsMeasure.add`) that is called with each decoded piece, even if the result is None.
    Raises ProbeError if the audio does not decode or is not allowed.
    """
    with open_audio(data, limits) as video:
        stream = audio_stream(video)
        if stream is None:
            return None
        places = _StoredPackets(memoryview(data))
        pieces = _PieceNumbers()
        packets = places.watch(audio_packets(video, stream))
        for piece in decode_pieces(stream, packets, video.container_name == "mov"):
            pieces.add(piece)
            if see is not None:
                see(piece)
        context = stream.codec_context
        codec = context.codec.canonical_name
        is_possible = codec in INDEXED_CODECS and can_start_anywhere(codec, context.extradata or b"")
        is_possible = is_possible and places.are_stored
        if not is_possible or not pieces.fit(len(places.offsets)):
            return None
        info = replace(info_of(stream), sample_rate=pieces.rates.pop())
        info = replace(info, preroll=short_preroll(info, places.parts()))
    return _make_index(info, pieces, places, memoryview(data))


class _PieceNumbers:
    """Recorder for the position and the number of samples of each piece. The samples themselves are not kept."""

    def __init__(self) -> None:
        self.packets, self.positions, self.heads, self.counts = (array("q") for _ in range(4))
        self.rates: set[int] = set()

    def add(self, piece: Piece) -> None:
        self.packets.append(piece.packet)
        self.positions.append(piece.position)
        self.heads.append(piece.head)
        self.counts.append(piece.samples.shape[1])
        self.rates.add(piece.sample_rate)

    def fit(self, num_packets: int) -> bool:
        """Return whether every packet decoded to at most one piece, and all pieces have the same sample rate."""
        is_single = bool((np.diff(self.packets) > 0).all())
        return len(self.rates) == 1 and is_single and self.packets[-1] < num_packets


class _StoredPackets:
    """Recorder for the sizes of the packets that pass through `watch`, and for their offsets in the file `data`."""

    def __init__(self, data: memoryview) -> None:
        self._data, self.are_stored = data, True
        self.offsets, self.sizes = array("q"), array("q")

    def watch(self, packets: Iterator[Packet[AudioStream]]) -> Iterator[Packet[AudioStream]]:
        for packet in packets:
            offset = stored_offset(packet, self._data) if self.are_stored else -1
            self.are_stored = offset >= 0 and not packet.has_sidedata("new_extradata")
            self.offsets.append(offset)
            self.sizes.append(packet.size)
            yield packet

    def parts(self) -> Iterator[memoryview]:
        """Yield the bytes of each packet."""
        for offset, size in zip(self.offsets, self.sizes, strict=True):
            yield self._data[offset : offset + size]


def _make_index(info: AudioStreamInfo, pieces: _PieceNumbers, places: _StoredPackets, data: memoryview) -> AudioIndex:
    size = len(places.offsets)
    positions, heads, counts = (np.zeros(size, np.int64) for _ in range(3))
    numbers = np.array(pieces.packets)
    positions[numbers], heads[numbers], counts[numbers] = pieces.positions, pieces.heads, pieces.counts
    # Packets without samples get the position of the next packet with some, for the preroll.
    following = np.minimum(np.searchsorted(numbers, np.arange(size)), len(numbers) - 1)
    positions = positions[numbers[following]]
    offsets, sizes = np.array(places.offsets, np.int64), np.array(places.sizes, np.int64)
    edges = _segment_edges(offsets, sizes)
    digests = b"".join(
        checksum(data[offsets[first] : offsets[stop - 1] + sizes[stop - 1]]) for first, stop in pairwise(edges.tolist())
    )
    checksums = np.frombuffer(digests, np.uint8).reshape(-1, CHECKSUM_BYTES)
    return AudioIndex(info, positions, offsets, sizes, heads, counts, checksums)
