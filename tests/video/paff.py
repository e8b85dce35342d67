"""Writer of H.264 transport streams with frames coded as two fields (PAFF), which no available encoder makes.

All macroblocks are uncompressed samples (I_PCM), so that each field has one known color.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import av
from av.packet import Packet

WIDTH, HEIGHT = 32, 64
_TICKS = 3600  # a frame at 25 fps, in units of 1/90000 s


@dataclass(frozen=True)
class Picture:
    """Frame with its display position, whether others may refer to it, and whether it is coded as two fields."""

    display: int
    is_reference: bool
    is_fields: bool
    is_idr: bool = False


class _Writer:
    def __init__(self) -> None:
        self.bits = ""

    def put(self, value: int, size: int) -> _Writer:
        self.bits += f"{value:0{size}b}" if size else ""
        return self

    def golomb(self, *values: int) -> _Writer:
        for value in values:
            digits = f"{value + 1:b}"
            self.bits += "0" * (len(digits) - 1) + digits
        return self

    def align(self) -> _Writer:
        self.bits += "0" * (-len(self.bits) % 8)
        return self

    def unit(self, reference: int, kind: int) -> bytes:
        self.bits += "1"
        self.align()
        payload = int(self.bits, 2).to_bytes(len(self.bits) // 8, "big")
        for last in range(4):  # emulation prevention for bytes that look like a start code
            payload = payload.replace(bytes([0, 0, last]), bytes([0, 0, 3, last]))
        return b"\0\0\0\1" + bytes([reference << 5 | kind]) + payload


def _parameters() -> bytes:
    sequence = _Writer().put(77, 8).put(0, 8).put(30, 8).golomb(0, 0, 0, 4, 2).put(0, 1)
    sequence.golomb(WIDTH // 16 - 1, HEIGHT // 32 - 1).put(0b00100, 5)  # fields are allowed; no cropping, no VUI
    picture = _Writer().golomb(0, 0).put(0, 2).golomb(0, 0, 0).put(0, 3).golomb(0, 0, 0).put(0b100, 3)
    return sequence.unit(3, 7) + picture.unit(3, 8)


def _slice(picture: Picture, frame_num: int, parity: int | None, value: int) -> bytes:
    is_idr = picture.is_idr and parity != 1
    slice_ = _Writer().golomb(0, 7, 0).put(frame_num % 16, 4).put(parity is not None, 1)
    if parity is not None:
        slice_.put(parity, 1)
    if is_idr:
        slice_.golomb(0)
    slice_.put((2 * picture.display + (parity or 0)) % 256, 8)
    if picture.is_reference:
        slice_.put(0, 2 if is_idr else 1)
    slice_.golomb(0, 1)  # no change of the quantizer, no deblocking
    for _ in range(WIDTH * HEIGHT // 256 // (1 if parity is None else 2)):
        slice_.golomb(25).align()
        slice_.bits += f"{value:08b}" * 256 + f"{128:08b}" * 128
    return slice_.unit(3 if picture.is_reference else 0, 5 if is_idr else 1)


def top_value(display: int) -> int:
    """Return the luma of a frame's top field; a bottom field, if any, has 3 more."""
    return 20 + 7 * (display % 30)


def transport_stream(pictures: Sequence[Picture], *, left_out: int | None = None) -> bytes:
    """Return the stream of these pictures in decode order, without packet number `left_out`."""
    packets: list[tuple[int, int, bytes, bool]] = []
    frame_num = 0
    for order, picture in enumerate(pictures):
        frame_num = 0 if picture.is_idr else frame_num
        start = _parameters() if picture.is_idr else b""
        time, value = picture.display * _TICKS, top_value(picture.display)
        parities = (0, 1) if picture.is_fields else (None,)
        for parity in parities:
            half = (parity or 0) * _TICKS // 2
            data = (b"" if parity else start) + _slice(picture, frame_num, parity, value + 3 * (parity or 0))
            packets.append((time + half, order * _TICKS + half, data, picture.is_idr and not parity))
        frame_num += picture.is_reference
    out = io.BytesIO()
    with av.open(out, "w", format="mpegts") as container:
        stream = container.add_mux_stream("h264", width=WIDTH, height=HEIGHT)
        for number, (pts, dts, data, is_key) in enumerate(packets):
            if number == left_out:
                continue
            packet = Packet(data)
            packet.stream, packet.is_keyframe = stream, is_key
            packet.pts, packet.dts = pts + 10 * _TICKS, dts + 6 * _TICKS
            container.mux(packet)
    return out.getvalue()
