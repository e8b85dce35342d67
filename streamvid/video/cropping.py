"""Crop boxes that containers declare: `clap` in MOV, MP4 and HEIF (ISO/IEC 14496-12, 12.1.4) and PixelCrop in Matroska.

FFmpeg's libraries read these boxes, and the ffmpeg program applies them, but PyAV does not expose them. As in
FFmpeg, an impossible box is ignored, and offsets are rounded down to whole pixels.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from fractions import Fraction
from typing import TypeAlias

from streamvid.video.bitstream.boxes import MAX_BOXES, ReadAt, boxes, find_box

Margins: TypeAlias = tuple[int, int, int, int]
"""Pixels to cut off a decoded frame: (left, top, right, bottom)."""

NO_MARGINS: Margins = (0, 0, 0, 0)
_MAX_READS, _MAX_READ_BYTES = 1 << 16, 1 << 20
_VISUAL_ENTRY_BYTES = 78
_SEGMENT, _TRACKS, _CLUSTER, _TRACK, _VIDEO = 0x18538067, 0x1654AE6B, 0x1F43B675, 0xAE, 0xE0
_BOTTOM, _TOP, _LEFT, _RIGHT, _WIDTH, _HEIGHT = 0x54AA, 0x54BB, 0x54CC, 0x54DD, 0xB0, 0xBA


def container_margins(read_at: ReadAt, num_bytes: int) -> dict[int, Margins]:
    """Map each stream ID (MOV) or video track number (Matroska) to the cropping margins of its stream.

    The result is empty if finding the boxes would require more reads than any real file needs.
    """
    read_at = _limited(read_at)
    try:
        if read_at(0, 4) == b"\x1a\x45\xdf\xa3":
            return dict(_of_matroska(read_at, num_bytes))
        if read_at(4, 4) in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
            return dict(_of_mov(read_at, num_bytes))
    except (struct.error, IndexError, _Excessive):
        pass  # FFmpeg reports truncated files
    return {}


class _Excessive(Exception):
    """Error raised if finding the boxes would require more reads than any real file needs."""


def _limited(read_at: ReadAt) -> ReadAt:
    reads = itertools.count()

    def read(offset: int, size: int) -> bytes:
        if next(reads) >= _MAX_READS or size > _MAX_READ_BYTES:
            raise _Excessive
        return read_at(offset, size)

    return read


# MOV, MP4 and HEIF.


def _of_mov(read_at: ReadAt, num_bytes: int) -> Iterator[tuple[int, Margins]]:
    for kind, start, end in boxes(read_at, 0, num_bytes):
        if kind == b"moov":
            for track_kind, *track in boxes(read_at, start, end):
                if track_kind == b"trak":
                    yield from _of_track(read_at, track[0], track[1])
            return  # behind it are pictures or fragments, which may be far away
        elif kind == b"meta":
            yield from _of_items(read_at, start + 4, end)


def _of_track(read_at: ReadAt, start: int, end: int) -> Iterator[tuple[int, Margins]]:
    header = find_box(read_at, start, end, b"tkhd")
    described = find_box(read_at, start, end, b"mdia", b"minf", b"stbl", b"stsd")
    if header is None or described is None:
        return
    version = read_at(header[1], 1)[0]
    (track,) = struct.unpack_from(">I", read_at(header[1] + (20 if version else 12), 4))
    for _, entry, entry_end in boxes(read_at, described[1] + 8, described[2]):
        clap = find_box(read_at, entry + _VISUAL_ENTRY_BYTES, entry_end, b"clap")
        if clap is not None:
            size = struct.unpack_from(">HH", read_at(entry + 24, 4))
            yield track, _margins(read_at(clap[1], 32), *size)
        return  # FFmpeg reads the first description


def _of_items(read_at: ReadAt, start: int, end: int) -> Iterator[tuple[int, Margins]]:
    owned = find_box(read_at, start, end, b"iprp", b"ipco")
    linked = find_box(read_at, start, end, b"iprp", b"ipma")
    if owned is None or linked is None:
        return
    properties = list(boxes(read_at, owned[1], owned[2]))
    for item, places in _links(read_at(linked[1], linked[2] - linked[1])):
        found = {properties[place - 1][0]: properties[place - 1] for place in places if place <= len(properties)}
        if b"clap" in found and b"ispe" in found:
            size = struct.unpack_from(">II", read_at(found[b"ispe"][1] + 4, 8))
            yield item, _margins(read_at(found[b"clap"][1], 32), *size)


def _links(data: bytes) -> Iterator[tuple[int, list[int]]]:
    """Yield (item ID, property numbers) for each item in an `ipma` box (ISO/IEC 23008-12, 9.3)."""
    is_wide, (count,) = bool(data[3] & 1), struct.unpack_from(">I", data, 4)
    at, item_size = 8, 4 if data[0] else 2
    for _ in range(min(count, MAX_BOXES)):
        item = int.from_bytes(data[at : at + item_size], "big")
        num_links, at = data[at + item_size], at + item_size + 1
        size = 2 if is_wide else 1
        places = [int.from_bytes(data[at + i * size : at + (i + 1) * size], "big") for i in range(num_links)]
        yield item, [place & (0x7FFF if is_wide else 0x7F) for place in places if place & 0x7FFF]
        at += num_links * size


def _margins(clap: bytes, width: int, height: int) -> Margins:
    """Return the margins defined by a `clap` box, which stores the size and the center offset of the clean aperture."""
    numbers = struct.unpack_from(">IIIIiIiI", clap)
    if not all(numbers[1::2]):
        return NO_MARGINS
    wide, high, right, down = (Fraction(numbers[i], numbers[i + 1]) for i in (0, 2, 4, 6))
    left, top = (width - wide) / 2 + right, (height - high) / 2 + down
    if min(left, top, width - left - wide, height - top - high) < 0 or min(wide, high) < 1:
        return NO_MARGINS
    # In FFmpeg, each far edge is the number of the last pixel, rounded down.
    return int(left), int(top), width - 1 - int(left + wide - 1), height - 1 - int(top + high - 1)


# Matroska.


def _of_matroska(read_at: ReadAt, num_bytes: int) -> Iterator[tuple[int, Margins]]:
    for kind, start, end in _elements(read_at, 0, num_bytes):
        if kind != _SEGMENT:
            continue
        for inner, inner_start, inner_end in _elements(read_at, start, end):
            if inner == _CLUSTER:
                return
            if inner == _TRACKS:
                tracks = [place for kind, *place in _elements(read_at, inner_start, inner_end) if kind == _TRACK]
                videos = [
                    (at, stop)
                    for track_start, track_end in tracks
                    for kind, at, stop in _elements(read_at, track_start, track_end)
                    if kind == _VIDEO
                ]
                yield from enumerate(_of_video(read_at, at, stop) for at, stop in videos)
                return


def _of_video(read_at: ReadAt, start: int, end: int) -> Margins:
    found = {
        field: int.from_bytes(read_at(at, stop - at), "big")
        for field, at, stop in _elements(read_at, start, end)
        if stop - at <= 8
    }
    left, top, right, bottom = (found.get(kind, 0) for kind in (_LEFT, _TOP, _RIGHT, _BOTTOM))
    fits = left + right < found.get(_WIDTH, 0) and top + bottom < found.get(_HEIGHT, 0)
    return (left, top, right, bottom) if fits else NO_MARGINS


def _elements(read_at: ReadAt, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (ID, offset of the contents, offset of the end) for each EBML element (RFC 8794)."""
    for _ in range(MAX_BOXES):
        if start >= end:
            return
        head = read_at(start, 12)
        id_bytes = 9 - head[0].bit_length()
        size_bytes = 9 - head[id_bytes].bit_length()
        if id_bytes > 4 or size_bytes > 8:
            return
        kind = int.from_bytes(head[:id_bytes], "big")
        bits = int.from_bytes(head[id_bytes : id_bytes + size_bytes], "big") & (1 << 7 * size_bytes) - 1
        at = start + id_bytes + size_bytes
        is_unknown = bits == (1 << 7 * size_bytes) - 1
        stop = end if is_unknown else min(end, at + bits)
        yield kind, at, stop
        start = stop
