"""Detection of true key frames and of hidden packets from the first bits of a packet.

Containers may flag packets as key frames even if decoding cannot start there: pictures of a gradual refresh, or every
packet (a MOV file without a `stss` box, many AVI and ASF files). A decoder that starts there returns smeared pictures
with the right timestamps and no error. A flag is therefore trusted only if the picture's own header agrees.
"""

from __future__ import annotations

import io
from collections.abc import Callable

from streamvid.video.bitstream import h264
from streamvid.video.bitstream.bits import Bits, after
from streamvid.video.bitstream.h264 import split_units
from streamvid.video.bitstream.images import GIF_IMAGE, gif_blocks

_HEVC_ENTRIES, _HEVC_PICTURES = range(16, 24), range(32)
_AV1_SEQUENCE, _AV1_FRAMES = 1, (3, 6)
#: Codecs with pictures that refer to others but do not declare it in their header: only the first packet is an entry.
_UNDECLARED = frozenset({"qtrle", "gif"})


def is_entry(codec: str, packet: memoryview, header: bytes, *, is_first: bool) -> bool:
    """Return whether decoding can start at a packet that the container flags as a key frame.

    header: the decoder's extradata.
    is_first: True for the first packet of the stream.

    This module does not parse codecs in which pictures do not refer to each other. For these codecs, it trusts the
    container's flag.
    """
    if codec in _UNDECLARED:
        return is_first
    read = _READERS.get(codec)
    return read is None or read(packet, header)


def is_mpeg4_b_picture(packet: memoryview) -> bool:
    """Return whether the first picture of an MPEG-4 packet is displayed before the previous reference picture."""
    return after(packet, b"\0\0\1\xb6").take(2)[0] == 2


def _is_hevc_entry(packet: memoryview, header: bytes) -> bool:
    length_size = (header[21] & 0b11) + 1 if len(header) > 21 and header[0] == 1 else 0
    kinds = (unit[0] >> 1 & 0b111111 for unit in split_units(packet, length_size) if len(unit))
    # Long messages may precede the picture, and of a remote file only the first bytes are read.
    return next((kind in _HEVC_ENTRIES for kind in kinds if kind in _HEVC_PICTURES), True)


def _is_mpeg12_entry(packet: memoryview, _header: bytes) -> bool:
    """Return whether an MPEG-1 or MPEG-2 picture is intra-coded (ISO/IEC 13818-2, 6.2.3).

    The start code is followed by a 10-bit temporal reference and a 3-bit coding type, where 1 means intra.
    """
    return after(packet, b"\0\0\1\0").take(10, 3)[1] == 1


def _is_mpeg4_entry(packet: memoryview, _header: bytes) -> bool:
    """Return whether an MPEG-4 picture is intra-coded (ISO/IEC 14496-2, 6.2.5).

    If it is, the 2 bits after the start code are 0.
    """
    return after(packet, b"\0\0\1\xb6").take(2)[0] == 0


def _is_h263_entry(packet: memoryview, _header: bytes) -> bool:
    """Return whether an H.263 picture is intra-coded (ITU-T H.263, 5.1).

    The header consists of a 22-bit start code, an 8-bit temporal reference, and PTYPE or PLUSPTYPE.
    """
    start, _, _, source_format, coding_type = Bits(packet).take(22, 8, 5, 3, 1)
    if start != 1 << 5:
        return False
    if source_format != 0b111:
        return coding_type == 0
    *_, has_options = Bits(packet).take(22, 8, 5, 3, 3)
    *_, coding_type = Bits(packet).take(22, 8, 5, 3, 3, 18 if has_options == 1 else 0, 3)
    return coding_type == 0


def _is_flv1_entry(packet: memoryview, _header: bytes) -> bool:
    """Return whether a Sorenson H.263 picture is intra-coded.

    The header consists of a start code (17 bits), version (5), temporal reference (8), size (3) and coding type (2).
    """
    *_, size = Bits(packet).take(17, 5, 8, 3)
    return Bits(packet).take(17, 5, 8, 3, {0: 16, 1: 32}.get(size, 0), 2)[-1] == 0


def _is_msmpeg4_entry(packet: memoryview, _header: bytes) -> bool:
    """Return whether an MS-MPEG4 (version 2 or 3) or WMV 1 picture is intra-coded, that is, starts with two 0 bits."""
    return Bits(packet).take(2)[0] == 0


def _is_wmv2_entry(packet: memoryview, _header: bytes) -> bool:
    """Return whether a WMV 2 picture is intra-coded, that is, starts with a 0 bit."""
    return Bits(packet).take(1)[0] == 0


def _is_wmv3_entry(packet: memoryview, header: bytes) -> bool:
    """Return whether a VC-1 simple or main profile picture is intra-coded (SMPTE 421M, 7.1.1 and annex J, STRUCT_C)."""
    *_, has_range, num_b_frames, _, has_interpolation, _ = Bits(memoryview(header)).take(24, 1, 3, 2, 1, 1)
    *_, is_predicted, is_intra = Bits(packet).take(has_interpolation, 2, has_range, 1, 1)
    return not is_predicted and (not num_b_frames or bool(is_intra))


def _is_vc1_entry(packet: memoryview, header: bytes) -> bool:
    """Return whether a VC-1 advanced profile picture is intra-coded (SMPTE 421M, 6.1 and 7.1.1)."""
    sequence = after(memoryview(header), b"\0\0\1\x0f")
    *_, is_interlaced = sequence.take(41, 1)
    bits = after(packet, b"\0\0\1\x0d") if bytes(packet[:3]) == b"\0\0\1" else Bits(packet)
    coding = bits.ones(2) if is_interlaced else 0
    if coding == 2:  # two fields: the first picture type of both
        return bits.take(3)[0] <= 1
    return bits.ones(4) == 2


def _is_vp8_entry(packet: memoryview, _header: bytes) -> bool:
    """Return whether a VP8 picture is a key frame, that is, whether its first bit is 0 (RFC 6386, section 9.1)."""
    return not packet[0] & 1


def _is_theora_entry(packet: memoryview, _header: bytes) -> bool:
    """Return whether a Theora packet is an intra frame, that is, starts with two 0 bits (Theora specification, 7.1)."""
    return not packet[0] & 0xC0


def _is_vp9_entry(packet: memoryview, _header: bytes) -> bool:
    shows_existing, is_inter, _ = _vp9_head(packet)
    return not (shows_existing or is_inter)


def _is_av1_entry(packet: memoryview, _header: bytes) -> bool:
    """Return whether the first frame of an AV1 temporal unit is a key frame (AV1 specification, 5.3 and 5.9.2)."""
    at = 0
    while at < len(packet):
        kind, has_extension, has_size = packet[at] >> 3 & 0b1111, packet[at] >> 2 & 1, packet[at] >> 1 & 1
        at += 1 + has_extension
        num_bytes = len(packet) - at
        if has_size:
            num_bytes, at = _leb128(packet, at)
        if kind == _AV1_SEQUENCE and Bits(packet[at:]).take(3, 1, 1)[2]:
            return True  # a still picture with a reduced header
        if kind in _AV1_FRAMES:
            return Bits(packet[at:]).take(1, 2) == [0, 0]
        at += num_bytes
    return True  # long metadata precedes the frame, and of a remote file only the first bytes are read


def _leb128(packet: memoryview, at: int) -> tuple[int, int]:
    """Return the value of AV1's variable-length number at `at`, and the offset after it."""
    value = 0
    for place, byte in enumerate(packet[at : at + 8]):
        value |= (byte & 0x7F) << 7 * place
        if not byte & 0x80:
            return value, at + place + 1
    return value, len(packet)


def _is_ffv1_entry(packet: memoryview, _header: bytes) -> bool:
    """Return whether an FFV1 frame is a key frame (RFC 9043, 4.3).

    The flag is the first bit that the range coder decodes. It is 1 if the packet's first 16 bits are in the upper half
    of the coder's initial range.
    """
    return int.from_bytes(packet[:2], "big") >= 0x7F80


_READERS: dict[str, Callable[[memoryview, bytes], bool]] = {
    "h264": h264.is_entry,
    "hevc": _is_hevc_entry,
    "mpeg1video": _is_mpeg12_entry,
    "mpeg2video": _is_mpeg12_entry,
    "mpeg4": _is_mpeg4_entry,
    "h263": _is_h263_entry,
    "flv1": _is_flv1_entry,
    "msmpeg4v2": _is_msmpeg4_entry,
    "msmpeg4v3": _is_msmpeg4_entry,
    "wmv1": _is_msmpeg4_entry,
    "wmv2": _is_wmv2_entry,
    "wmv3": _is_wmv3_entry,
    "vc1": _is_vc1_entry,
    "theora": _is_theora_entry,
    "vp8": _is_vp8_entry,
    "vp9": _is_vp9_entry,
    "av1": _is_av1_entry,
    "ffv1": _is_ffv1_entry,
}


def is_hidden(codec: str, packet: memoryview) -> bool:
    """Return whether a packet contains only a VP8 or VP9 reference frame that is not displayed, or a GIF comment."""
    if codec == "gif":
        return all(block != GIF_IMAGE for block in gif_blocks(io.BytesIO(packet)))
    if codec == "vp8":
        return not packet[0] >> 4 & 1
    if codec != "vp9" or packet[-1] >> 5 == 0b110:  # a superframe contains a shown frame
        return False
    shows_existing, _, shows_frame = _vp9_head(packet)
    return not (shows_existing or shows_frame)


def _vp9_head(packet: memoryview) -> tuple[int, int, int]:
    """Return the header fields show_existing_frame, frame_type (0 for key) and show_frame (VP9 specification, 6.2)."""
    shift = 1 if packet[0] >> 4 & 0b11 == 0b11 else 0  # profile 3 has one more bit
    return packet[0] >> 3 - shift & 1, packet[0] >> 2 - shift & 1, packet[0] >> 1 - shift & 1
