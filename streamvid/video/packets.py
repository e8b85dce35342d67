"""Packet table of a video: its frames, their timestamps and its key packets, found without decoding.

A packet shows no frame if an edit list discards it, if it is empty, if it is a hidden reference picture (VP8, VP9) or a
comment (GIF), or if it precedes the first key frame, because its picture refers to pictures that were cut off.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, islice, pairwise
from typing import TYPE_CHECKING

from streamvid.errors import DecodeError, ProbeError
from streamvid.video.bitstream import h264
from streamvid.video.bitstream.entries import is_entry, is_hidden
from streamvid.video.bitstream.images import gif_blocks, tiff_compression
from streamvid.video.container import VideoFile, ffmpeg_errors, read_stream
from streamvid.video.fields import join_fields, separates_fields
from streamvid.video.reorder import display_times, stores_decode_times

if TYPE_CHECKING:
    from av.packet import Packet
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

_TAIL_BYTES = 4096
_OGG_PAGE_BYTES = 65307  # the largest page
_ASF_FILE = bytes.fromhex("a1dcab8c47a9cf118ee400c00c205365")
_PNG_PACKED = (b"zTXt", b"iCCP")  # chunks that FFmpeg unpacks without a limit; it ignores iTXt
_MAX_UNPACKED_MIB = 16
_TIFF_JPEG = (6, 7, 34892)  # old JPEG, JPEG, lossy JPEG of DNG
_EBML, _SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"


@dataclass(frozen=True, slots=True)
class PacketTable:
    """The packets of one video.

    - timestamps: presentation times of the displayed frames, ascending, in ticks of `time_base`; the index is the frame
      number.
    - ordinals: position of each frame's packet in decode order, indexed by frame number.
    - keys: (timestamp, ordinal) for each key packet in decode order, including discarded packets; packets that the
      container flags as key packets, but at which decoding cannot start, are left out (see entries.py).
    - rows: (timestamp, byte position, size) for each packet in decode order, used to recognize packets.
    - reorder_depth: maximum number of frames that a decoder holds back to return frames in display order.
    - last_duration: duration of the last displayed frame, in ticks; 0 if unknown.
    - x264_core: version of x264 that wrote a stream that deviates from the standard; 0 for all other streams.
    """

    timestamps: tuple[int, ...]
    ordinals: tuple[int, ...]
    keys: tuple[tuple[int, int], ...]
    rows: tuple[tuple[int | None, int | None, int], ...]
    reorder_depth: int
    time_base: Fraction
    last_duration: int
    x264_core: int = 0

    @property
    def keyframes(self) -> tuple[int, ...]:
        """Frame numbers of the displayed key frames."""
        key_ordinals = {ordinal for _, ordinal in self.keys}
        return tuple(number for number, ordinal in enumerate(self.ordinals) if ordinal in key_ordinals)

    def decode_starts(self, first_frame: int, last_frame: int) -> list[tuple[int, int]]:
        """Return (timestamp, ordinal) for up to two key packets from which these frames can be decoded, best first.

        The second packet precedes the first. It is needed only if decoding cannot start at the first.
        """
        first_needed = min(self.ordinals[first_frame : last_frame + 1])
        wanted_from = self.timestamps[first_frame]
        usable = [key for key in self.keys if key[0] <= wanted_from and key[1] <= first_needed]
        return usable[:-3:-1]


def read_packets(video: VideoFile, see: Callable[[Packet[VideoStream]], None] | None = None) -> PacketTable:
    """Read all packets once, and return the packet table.

    Raises ProbeError if the file ends early or exceeds a limit, or if timestamps do not identify each frame.

    see: function that is called with each packet. In packets of remote files, bytes that were not read are 0.
    """
    rows: list[tuple[int | None, int | None, int]] = []
    keys: list[tuple[int, int]] = []
    shown: list[tuple[int, int, int]] = []
    core = 0
    with video.bodies_left_out():
        for packet in each_packet(video):
            ordinal = len(rows)
            if ordinal >= video.limits.max_frames:
                raise ProbeError(
                    f"the video has more packets than max_frames={video.limits.max_frames} allows", kind="limit"
                )
            if packet.is_corrupt:
                raise ProbeError(_broken_off(video, ordinal), kind="damaged")
            if see is not None:
                see(packet)
            header = video.decoder.extradata or b""
            if not rows and video.codec_name == "h264":
                core = h264.x264_core(memoryview(packet), header)
            rows.append((packet.pts, packet.pos, packet.size))
            is_entry_point = packet.is_keyframe and is_entry(
                video.codec_name, memoryview(packet), header, is_first=ordinal == 0
            )
            if is_entry_point and packet.pts is not None:
                keys.append((packet.pts, ordinal))
            if packet.is_discard or is_hidden(video.codec_name, memoryview(packet)):
                continue
            if packet.pts is None:
                raise ProbeError(f"packet {ordinal} of the video has no timestamp; {remedy()}", kind="timestamps")
            shown.append((packet.pts, ordinal, packet.duration or 0))
            if video.is_image:
                break
    _check_complete(video, rows)
    return replace(_make_table(video, rows, keys, shown), x264_core=core)


def each_packet(video: VideoFile) -> Iterator[Packet[VideoStream]]:
    """Yield the remaining packets from the demuxer, except empty packets, which would flush a decoder.

    Packets of a container that stores only decode times receive presentation times (see reorder.py). Packets that
    contain one field each are joined into frames (see fields.py).
    """
    with (
        ffmpeg_errors("the file ends early or is damaged: not all of its packets can be read"),
        closing(read_stream(video.container, video.stream)) as packets,
    ):
        filled: Iterator[Packet[VideoStream]] = (packet for packet in packets if packet.size)
        if stores_decode_times(video.container_name, video.codec_name):
            filled = display_times(filled, video.stream, video.codec_name)
        elif separates_fields(video.container_name, video.codec_name):
            filled = join_fields(filled, video.stream)
        for packet in filled:
            if video.codec_name == "png":
                _refuse_png_bomb(memoryview(packet))
            elif video.codec_name == "tiff" and tiff_compression(memoryview(packet)) in _TIFF_JPEG:
                # FFmpeg decodes it only for camera raw files (DNG), and otherwise returns black without an error.
                raise ProbeError(
                    "the TIFF is compressed with JPEG, which is not supported; save it as JPEG or PNG, or as TIFF with "
                    "LZW or Deflate compression",
                    kind="picture",
                )
            yield packet


def packets_from(video: VideoFile, table: PacketTable, ordinal: int) -> Iterator[tuple[int, Packet[VideoStream]]]:
    """Yield (ordinal, packet) pairs, starting at `ordinal`.

    If seeking is reliable and leads to the expected packet, seek; otherwise, read the file from its start.
    """
    if video.is_exact:
        with ffmpeg_errors("seeking in the file failed"):
            video.container.seek(table.rows[ordinal][0] or 0, stream=video.stream)
        packets = each_packet(video)
        first = next(packets, None)
        if first is not None and _row(first) == table.rows[ordinal]:
            return chain([(ordinal, first)], _recognised(packets, table, ordinal + 1))
    video.reopen()
    return (found for found in _recognised(each_packet(video), table, 0) if found[0] >= ordinal)


def _recognised(
    packets: Iterator[Packet[VideoStream]], table: PacketTable, first: int
) -> Iterator[tuple[int, Packet[VideoStream]]]:
    for number, (packet, row) in enumerate(zip(packets, table.rows[first:], strict=False), start=first):
        if _row(packet) != row:
            raise DecodeError(
                f"packet {number} of the video changed while the file was being read; do not modify the file while it "
                "is in use"
            )
        yield number, packet


def _row(packet: Packet[VideoStream]) -> tuple[int | None, int | None, int]:
    return packet.pts, packet.pos, packet.size


def _refuse_png_bomb(packet: memoryview) -> None:
    """Raise ProbeError if the text and color profiles in a PNG are unreasonably large when decompressed."""
    left, at = _MAX_UNPACKED_MIB << 20, 8
    while at + 8 <= len(packet):
        num_bytes, kind = int.from_bytes(packet[at : at + 4], "big"), bytes(packet[at + 4 : at + 8])
        chunk = packet[at + 8 : at + 8 + num_bytes]
        at += 12 + num_bytes
        if kind not in _PNG_PACKED:
            continue
        start = bytes(chunk[:80]).find(0) + 2  # after the name and the number of the method
        try:
            left -= len(zlib.decompressobj().decompress(chunk[start:], left + 1))
        except zlib.error:  # FFmpeg frees what it has unpacked
            continue
        if left < 0:
            raise ProbeError(
                f"the PNG's {' and '.join(name.decode() for name in _PNG_PACKED)} chunks decompress to more than "
                f"{_MAX_UNPACKED_MIB} MiB in total; save the image again without metadata",
                kind="limit",
            )


def decoded(video: VideoFile, problem: str, first: int = 0, stop: int | None = None) -> Iterator[VideoFrame]:
    """Decode packets `first` to `stop` (exclusive, in decode order) with a new decoder, and yield all frames.

    Raises ProbeError, with a message that begins with `problem`, if decoding fails.
    """
    video.reopen()
    with ffmpeg_errors(problem):
        for packet in islice(each_packet(video), first, stop):
            yield from video.decoder.decode(packet)
        yield from video.decoder.decode(None)


def remedy() -> str:
    """Return advice on repairing a file with unreliable timestamps, for use in error messages."""
    return "re-encode the file (ffmpeg -i IN OUT.mp4)"


def _make_table(
    video: VideoFile,
    rows: list[tuple[int | None, int | None, int]],
    keys: list[tuple[int, int]],
    shown: list[tuple[int, int, int]],
) -> PacketTable:
    if not rows:
        raise ProbeError("the video has a header but no packets; copy or download the file again", kind="damaged")
    if not keys:
        raise ProbeError("the video has no key frame to start decoding from; re-encode it", kind="damaged")
    first_time, first_ordinal = keys[0]
    frames = sorted(frame for frame in shown if frame[0] >= first_time and frame[1] >= first_ordinal)
    if not frames:
        raise ProbeError(
            "no frames are displayed from the first key frame onward (an edit list may hide all of them); re-encode "
            "the file",
            kind="damaged",
        )
    timestamps = tuple(frame[0] for frame in frames)
    for earlier, later in pairwise(timestamps):
        if earlier == later:
            raise ProbeError(
                f"two frames of the video have the same timestamp ({later}); {remedy()}", kind="timestamps"
            )
    in_order = sorted(row[0] for row in rows if row[0] is not None)
    depth = max(i - bisect_right(in_order, row[0]) + 1 for i, row in enumerate(rows) if row[0] is not None)
    return PacketTable(
        timestamps=timestamps,
        ordinals=tuple(frame[1] for frame in frames),
        keys=tuple(keys),
        rows=tuple(rows),
        reorder_depth=max(0, depth),
        time_base=video.stream.time_base or Fraction(1, 1),
        last_duration=frames[-1][2],
    )


def _check_complete(video: VideoFile, rows: list[tuple[int | None, int | None, int]]) -> None:
    """Raise ProbeError if the file is shorter than its header or index declares."""
    if video.container_name == "mov":
        missing = sum(entry.pos + entry.size > video.num_bytes for entry in video.stream.index_entries)
        if missing:
            raise ProbeError(_broken_off(video, len(video.stream.index_entries) - missing), kind="damaged")
        return
    if video.container_name == "gif" and not _has_end_mark(video):
        raise ProbeError(
            "the file ends early: the GIF has no trailer byte; copy or download the file again", kind="damaged"
        )
    if video.container_name == "ogg" and not _ends_with_page(video):
        raise ProbeError(
            "the file ends early: its last Ogg page is incomplete; copy or download the file again", kind="damaged"
        )
    promised = 0
    if video.container_name == "matroska":
        promised = _matroska_end(video)
    elif video.container_name == "asf":
        promised = _asf_end(video.head)
    elif video.container_name == "avi":
        promised = 8 + int.from_bytes(video.head[4:8], "little")
    if promised > video.num_bytes:
        raise ProbeError(
            f"the file ends early: the header declares {promised} bytes, but the file is {video.num_bytes} bytes long; "
            "copy or download the file again",
            kind="damaged",
        )


def _has_end_mark(video: VideoFile) -> bool:
    """Return whether a GIF ends with the trailer byte. Zeros or a comment after the trailer are allowed."""
    video.reader.seek(max(0, video.num_bytes - _TAIL_BYTES))
    if video.reader.read(_TAIL_BYTES).rstrip(b"\0").endswith(b";"):
        return True
    video.reader.seek(0)
    *_, last = gif_blocks(video.reader)
    return last == b";"


def _ends_with_page(video: VideoFile) -> bool:
    """Return whether the last page of an Ogg file is complete and ends at the end of the file (RFC 3533, 6)."""
    video.reader.seek(max(0, video.num_bytes - _OGG_PAGE_BYTES))
    tail = video.reader.read(_OGG_PAGE_BYTES)
    at = tail.rfind(b"OggS")
    while at >= 0:
        sizes = tail[at + 27 : at + 27 + (tail[at + 26] if at + 26 < len(tail) else 0)]
        if at + 27 + len(sizes) + sum(sizes) == len(tail):
            return True
        at = tail.rfind(b"OggS", 0, at)
    return False


def _broken_off(video: VideoFile, num_found: int) -> str:
    promised = max(video.stream.frames, len(video.stream.index_entries) if video.container_name == "mov" else 0)
    if promised > num_found:
        problem = f"the file ends early: it declares {promised} frames, but only {num_found} are complete"
    else:
        problem = f"the file ends early or is damaged: video packet {num_found} is incomplete"
    return f"{problem}; copy or download the file again"


def _matroska_end(video: VideoFile) -> int:
    """Return the byte offset of the Segment's end according to its header, or 0 if unknown (as in a live recording)."""
    head = video.head
    if not head.startswith(_EBML):
        return 0
    size, start = _ebml_size(head, len(_EBML))
    segment = start + size
    if head[segment : segment + len(_SEGMENT)] != _SEGMENT:
        return 0
    size, start = _ebml_size(head, segment + len(_SEGMENT))
    return start + size if size else 0


def _asf_end(head: bytes) -> int:
    """Return the size of the file in bytes according to its header, or 0 if unknown (as in a live recording)."""
    at = head.find(_ASF_FILE)
    if not 0 <= at <= len(head) - 92:
        return 0
    is_live = head[at + 88] & 1
    return 0 if is_live else int.from_bytes(head[at + 40 : at + 48], "little")


def _ebml_size(head: bytes, at: int) -> tuple[int, int]:
    """Return (value, end offset) of the variable-length number at offset `at`; value 0 means unknown."""
    first = head[at] if at < len(head) else 0
    length = 9 - first.bit_length()
    if not first or at + length > len(head):
        return 0, at + 1
    value = int.from_bytes(head[at : at + length], "big") & ((1 << 7 * length) - 1)
    return (0 if value == (1 << 7 * length) - 1 else value), at + length
