"""A look at the first bits of packets, for what containers do not say: entry points and hidden pictures.

Containers flag "gradual refresh" pictures as key frames, although the picture is whole only some frames later; a
decoder that starts there hands on grey smears with the right timestamps and no error.
"""

from __future__ import annotations

from collections.abc import Iterator

_IDR, _SEI = 5, 6
_RECOVERY_POINT = 6


def is_h264_entry(packet: memoryview, header: bytes) -> bool:
    """False if `packet`, flagged as a key frame, says itself that its picture is whole only some frames later.

    header: the decoder's extradata, an avcC box or start-code data.
    """
    length_size = (header[4] & 0b11) + 1 if len(header) > 4 and header[0] == 1 else 0
    for unit in _units(packet, length_size):
        kind = unit[0] & 0b11111 if len(unit) else 0
        if kind == _IDR:
            return True
        if kind == _SEI:
            payload = _recovery_point(unit[1:])
            # It begins with the number of frames until then, Exp-Golomb coded: a first bit of 1 is the number 0.
            if payload:
                return payload[0] >= 0x80
    return True


def is_hidden(codec: str, packet: memoryview) -> bool:
    """True for a packet that decodes to no picture: a VP8 or VP9 "alternative reference" that stands alone."""
    head = packet[0]
    if codec == "vp8":
        return not head >> 4 & 1
    if codec != "vp9" or packet[-1] >> 5 == 0b110:  # a superframe: it holds a shown frame
        return False
    shift = 1 if head >> 4 & 0b11 == 0b11 else 0  # profile 3 has one more bit
    shows_existing, shows_frame = head >> 3 - shift & 1, head >> 1 - shift & 1
    return not (shows_existing or shows_frame)


def _units(packet: memoryview, length_size: int) -> Iterator[memoryview]:
    if length_size:
        at = 0
        while at + length_size < len(packet):
            size = int.from_bytes(packet[at : at + length_size], "big")
            at += length_size
            yield packet[at : at + size]
            at += size
    else:
        data = bytes(packet)
        at = data.find(b"\0\0\1")
        while at >= 0:
            end = data.find(b"\0\0\1", at + 3)
            yield packet[at + 3 : end if end >= 0 else len(packet)]
            at = end


def _recovery_point(messages: memoryview) -> memoryview | None:
    at = 0
    while at + 2 < len(messages):
        kind = size = 0
        while at < len(messages) and messages[at] == 0xFF:
            kind, at = kind + 0xFF, at + 1
        kind, at = kind + messages[min(at, len(messages) - 1)], at + 1
        while at < len(messages) and messages[at] == 0xFF:
            size, at = size + 0xFF, at + 1
        size, at = size + messages[min(at, len(messages) - 1)], at + 1
        if kind == _RECOVERY_POINT:
            return messages[at : at + size]
        at += size
    return None
