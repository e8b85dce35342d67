"""Syntax of H.264 packets (ITU-T H.264): entry points, fields, and the version of x264 that wrote a stream."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from streamvid.video.bitstream.bits import Bits

_SLICE, _IDR, _SEI, _SEQUENCE, _PICTURE = 1, 5, 6, 7, 8
_USER_DATA, _RECOVERY_POINT = 5, 6
_SEQUENCE_BYTES, _SLICE_BYTES = 1024, 32
#: Profiles whose sequence parameters declare the chroma format and scaling lists (7.3.2.1.1).
_HIGH_PROFILES = frozenset({100, 110, 122, 244, 44, 83, 86, 118, 128, 138, 139, 134, 135})
_X264 = bytes.fromhex("dc45e9bde6d948b7962cd820d923eeef")
_X264_CORE = re.compile(rb"x264 - core ([0-9]{1,4})")
LAST_DEVIATING_CORE = 150
"""Last x264 version that deviates from the standard: versions up to 150 in 4:4:4, up to 33 in direct prediction."""


@dataclass(frozen=True, slots=True)
class Field:
    """Header of a packet that contains one field. Both fields of a frame have the same `frame_num`."""

    frame_num: int
    is_bottom: bool
    is_reference: bool
    is_idr: bool

    def is_second_of(self, first: Field) -> bool:
        """Return whether this field and the previous field, `first`, form one frame (ITU-T H.264, 3.30 and 3.31)."""
        return (
            self.frame_num == first.frame_num
            and self.is_bottom != first.is_bottom
            and not self.is_idr
            and (first.is_reference or not self.is_reference)
        )


class FieldReader:
    """Reader for the field headers in successive packets. Headers depend on the parameter sets of earlier packets."""

    def __init__(self, header: bytes) -> None:
        self._header = header
        self._sequences: dict[int, _Sequence] = {}
        self._pictures: dict[int, int] = {}
        if header[:1] == b"\x01":
            self._learn(_units_of_avcc(header))
        else:
            self._learn(units(memoryview(header), b""))

    def read(self, packet: memoryview) -> Field | None:
        """Return the header of the packet's first slice, or None if the packet contains a whole frame or no slice."""
        for unit in units(packet, self._header):
            kind = unit[0] & 0b11111 if len(unit) else 0
            if kind in (_SEQUENCE, _PICTURE):
                self._learn([unit])
            elif kind in (_SLICE, _IDR):
                return self._field(unit)
        return None

    def _learn(self, parts: Iterator[memoryview] | list[memoryview]) -> None:
        for unit in parts:
            kind = unit[0] & 0b11111 if len(unit) else 0
            if kind == _SEQUENCE:
                number, sequence = _read_sequence(unit)
                self._sequences[number] = sequence
            elif kind == _PICTURE:
                bits = _bits(unit)
                number, of = bits.golomb(), bits.golomb()
                self._pictures[number] = of

    def _field(self, unit: memoryview) -> Field | None:
        bits = _bits(unit)
        _first_macroblock, _kind, picture = bits.golomb(), bits.golomb(), bits.golomb()
        sequence = self._sequences.get(self._pictures.get(picture, -1))
        if sequence is None or sequence.has_only_frames:
            return None
        _, frame_num, is_field = bits.take(2 if sequence.has_separate_planes else 0, sequence.frame_num_bits, 1)
        (is_bottom,) = bits.take(1)
        if not is_field:
            return None
        return Field(frame_num, bool(is_bottom), bool(unit[0] >> 5 & 0b11), unit[0] & 0b11111 == _IDR)


@dataclass(frozen=True, slots=True)
class _Sequence:
    has_separate_planes: bool
    frame_num_bits: int
    has_only_frames: bool


def _read_sequence(unit: memoryview) -> tuple[int, _Sequence]:
    """Return the ID of a sequence parameter set and the fields needed to parse slice headers (7.3.2.1.1)."""
    bits = _bits(unit, _SEQUENCE_BYTES)
    profile, _, number = *bits.take(8, 16), bits.golomb()
    has_separate_planes = 0
    if profile in _HIGH_PROFILES:
        chroma = bits.golomb()
        if chroma == 3:
            (has_separate_planes,) = bits.take(1)
        _, _ = bits.golomb(), bits.golomb()
        _, has_lists = bits.take(1, 1)
        for place in range((8 if chroma != 3 else 12) if has_lists else 0):
            _skip_scaling_list(bits, 16 if place < 6 else 64)
    frame_num_bits = 4 + bits.golomb()
    order = bits.golomb()
    if order == 0:
        bits.golomb()
    elif order == 1:
        bits.take(1)
        _, _ = bits.golomb(), bits.golomb()
        for _ in range(min(bits.golomb(), 255)):
            bits.golomb()
    _num_references, _ = bits.golomb(), bits.take(1)
    _width, _height = bits.golomb(), bits.golomb()
    (has_only_frames,) = bits.take(1)
    return number, _Sequence(bool(has_separate_planes), min(frame_num_bits, 16), bool(has_only_frames))


def _skip_scaling_list(bits: Bits, size: int) -> None:
    """Skip a scaling list (7.3.2.1.1.1). No further values are stored after a scale of 0."""
    (is_present,) = bits.take(1)
    last = following = 8
    for _ in range(size if is_present else 0):
        if following:
            following = (last + bits.signed_golomb()) % 256
        last = following or last


def _bits(unit: memoryview, max_bytes: int = _SLICE_BYTES) -> Bits:
    """Return a reader for a NAL unit after its first byte, with emulation prevention bytes removed (7.4.1)."""
    return Bits(bytes(unit[1:max_bytes]).replace(b"\0\0\3", b"\0\0"), max_bytes)


def is_idr(packet: memoryview, header: bytes) -> bool:
    """Return whether a packet contains an IDR picture. All pictures decoded before it are also displayed before it."""
    return any(unit[0] & 0b11111 == _IDR for unit in units(packet, header) if len(unit))


def is_entry(packet: memoryview, header: bytes) -> bool:
    """Return whether decoding can start at a packet that is flagged as a key frame.

    Decoding cannot start there if a recovery point message declares that only later frames are complete.
    header: the decoder's extradata, which is an avcC box or data with start codes.
    """
    for unit in units(packet, header):
        kind = unit[0] & 0b11111 if len(unit) else 0
        if kind == _IDR:
            return True
        if kind == _SEI:
            payload = _message(unit[1:], _RECOVERY_POINT)
            # The payload begins with the number of frames until then, Exp-Golomb coded: a first bit of 1 means 0.
            if payload:
                return payload[0] >= 0x80
    return True


def x264_core(packet: memoryview, header: bytes) -> int:
    """Return the x264 version in a stream's first packet if that version deviates from the standard, otherwise 0.

    Old versions deviate in 4:4:4 and direct prediction, so the decoder must know the version.
    """
    for unit in units(packet, header):
        payload = _message(unit[1:], _USER_DATA) if len(unit) and unit[0] & 0b11111 == _SEI else None
        if payload is not None and payload[:16] == _X264:
            found = _X264_CORE.match(payload[16:64])
            core = int(found[1]) if found else 0
            return core if core <= LAST_DEVIATING_CORE else 0
    return 0


def x264_message(core: int, header: bytes) -> bytes:
    """Return a packet that contains only the version of x264. The extradata `header` determines the packet format."""
    text = _X264 + f"x264 - core {core}".encode() + b"\0"
    unit = bytes([_SEI, _USER_DATA, len(text)]) + text + b"\x80"
    size = _length_size(header)
    return (len(unit).to_bytes(size, "big") if size else b"\0\0\0\1") + unit


def units(packet: memoryview, header: bytes) -> Iterator[memoryview]:
    """Yield the NAL units in a packet. `header` is the decoder's extradata."""
    return split_units(packet, _length_size(header))


def split_units(packet: memoryview, length_size: int) -> Iterator[memoryview]:
    """Yield the NAL units of an H.264 or HEVC packet.

    length_size: number of bytes that store the length of each unit; 0 if start codes separate the units.
    """
    if length_size:
        at = 0
        while at + length_size < len(packet):
            size = int.from_bytes(packet[at : at + length_size], "big")
            at += length_size
            if not size:  # damaged, or bytes that were not read
                return
            yield packet[at : at + size]
            at += size
    else:
        data = bytes(packet)
        at = data.find(b"\0\0\1")
        while at >= 0:
            end = data.find(b"\0\0\1", at + 3)
            yield packet[at + 3 : end if end >= 0 else len(packet)]
            at = end


def _length_size(header: bytes) -> int:
    return (header[4] & 0b11) + 1 if len(header) > 4 and header[0] == 1 else 0


def _units_of_avcc(header: bytes) -> Iterator[memoryview]:
    """Yield the parameter sets of an avcC box (ISO/IEC 14496-15, 5.3.3.1.2)."""
    view, at = memoryview(header), 5
    for mask in (0b11111, 0xFF):
        count = view[at] & mask if at < len(view) else 0
        at += 1
        for _ in range(count):
            size = int.from_bytes(view[at : at + 2], "big")
            yield view[at + 2 : at + 2 + size]
            at += 2 + size


def _message(messages: memoryview, wanted: int) -> bytes | None:
    """Return the first message of type `wanted` in an SEI payload (7.3.2.3.1), or None if it is not found."""
    at = 0
    while at + 2 < len(messages):
        kind = size = 0
        while at < len(messages) and messages[at] == 0xFF:
            kind, at = kind + 0xFF, at + 1
        kind, at = kind + messages[min(at, len(messages) - 1)], at + 1
        while at < len(messages) and messages[at] == 0xFF:
            size, at = size + 0xFF, at + 1
        size, at = size + messages[min(at, len(messages) - 1)], at + 1
        if kind == wanted:
            return bytes(messages[at : at + size])
        at += size
    return None
