"""Tests of packet inspection: which key frames are entry points, and which packets show nothing."""

from __future__ import annotations

import pytest

from streamvid.video.bitstream.entries import is_hidden
from streamvid.video.bitstream.h264 import is_entry

_AVC = bytes([1, 100, 0, 10, 0xFF])  # first bytes of an avcC box: four-byte lengths


def _unit(*payload: int) -> bytes:
    return len(payload).to_bytes(4, "big") + bytes(payload)


@pytest.mark.parametrize(
    ("packet", "expected"),
    [
        (_unit(9, 0xF0) + _unit(0x65, 1, 2, 3), True),  # delimiter, IDR
        (_unit(6, 6, 1, 0x80) + _unit(0x41, 1), True),  # immediate recovery: an open GOP
        (_unit(6, 6, 1, 0x24) + _unit(0x41, 1), False),  # recovery after 8 frames
        (_unit(6, 5, 3, 1, 2, 3, 6, 1, 0x24) + _unit(0x41, 1), False),  # preceded by another message
        (_unit(0x41, 1), True),  # no message: the container's flag counts
        (_unit(6, 0xFF), True),
        (_unit(6, 6, 200, 0x24), False),
        (b"\xff\xff\xff\xff\x65", True),
        (b"", True),
    ],
)
def test_gradual_refresh_is_not_an_entry(packet: bytes, expected: bool) -> None:
    assert is_entry(memoryview(packet), _AVC) is expected


def test_start_codes_are_supported_too() -> None:
    assert not is_entry(memoryview(b"\0\0\0\1\x09\xf0\0\0\1\6\6\1\x24\0\0\1\x41\1"), b"")
    assert is_entry(memoryview(b"\0\0\0\1\x65\1\2"), b"")


@pytest.mark.parametrize(
    ("codec", "packet", "expected"),
    [
        ("vp8", b"\x10\0\0", False),
        ("vp8", b"\x01\0\0", True),
        ("vp9", bytes([0b10_00_0_0_1_0, 0, 0]), False),
        ("vp9", bytes([0b10_00_0_1_0_0, 0, 0]), True),
        ("vp9", bytes([0b10_00_1_000, 0, 0]), False),  # shows a picture that was hidden before
        ("vp9", bytes([0b10_11_0_0_0_1, 0, 0]), False),  # profile 3: the bits are one position later
        ("vp9", bytes([0b10_11_0_0_1_0, 0, 0]), True),
        ("vp9", bytes([0b10_00_0_1_0_0, 0, 0b110_00001]), False),  # a superframe
        ("h264", b"\0\0\0", False),
    ],
)
def test_hidden_pictures(codec: str, packet: bytes, expected: bool) -> None:
    """SAMPLE-2: a packet that shows nothing is not a frame."""
    assert is_hidden(codec, memoryview(packet)) is expected
