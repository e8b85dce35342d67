"""Tests that decoding frees its memory on return, without the garbage collector and without leaks.

A worker decodes millions of clips. An object that a call leaves behind is either leaked or stays among the memory of
later clips until the collector runs, so that their memory cannot be returned.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from streamvid.errors import DecodeError, ProbeError
from streamvid.video.decode.file import decode_into
from streamvid.video.probe import probe
from tests.video.clips import IMAGE_NAMES, VIDEO_NAMES, ClipFolder

LOST_BYTES = 64  # per call, on average; FFmpeg's smallest allocation for a read is larger
_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
KINDS = ["h264_open_gop.mp4", "h264.ts", "mpeg4.avi", "vp9_odd.webm", "turn_90.mp4", "image.jpg", "image.png"]


class MallocInfo(ctypes.Structure):
    """Structure `mallinfo2` of the C library."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS.split())


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.collect()  # the first collection may leave objects of other tests
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def damaged(data: bytes) -> bytes:
    """Return the video with 600 bytes overwritten in each of four places; FFmpeg does not detect all of them."""
    changed = bytearray(data)
    for tenths in (5, 6, 7, 8):
        middle = len(data) * tenths // 10
        changed[middle : middle + 600] = bytes(600)
    return bytes(changed)


def with_exif(jpeg: bytes) -> bytes:
    """Return the photo with an EXIF block that requests a rotation by 90 degrees."""
    tag = bytes.fromhex("0112 0003 00000001 00060000")
    block = b"Exif\0\0MM\0*" + (8).to_bytes(4, "big") + (1).to_bytes(2, "big") + tag + bytes(4)
    return jpeg[:2] + b"\xff\xe1" + (len(block) + 2).to_bytes(2, "big") + block + jpeg[2:]


def decode_some(data: bytes, start: int = 0) -> bool:
    """Decode one frame and return whether that succeeded."""
    with contextlib.suppress(DecodeError):
        decode_into(data, start, np.zeros((1, 16, 16, 3), np.uint8))
        return True
    return False


@pytest.mark.parametrize("name", [*VIDEO_NAMES, *IMAGE_NAMES])
def test_nothing_is_left_for_the_garbage_collector(clip: ClipFolder, name: str) -> None:
    """MEM: FFmpeg's pictures and decoders, however large, are freed when a call returns."""
    data = clip(name).read_bytes()
    num_frames = probe(data).num_frames
    decode_some(data)
    with no_collection():
        for start in (0, num_frames - 1, num_frames // 2):
            assert decode_some(data, start)
        probe(data)
        assert gc.collect() == 0


def test_a_rotated_photo_leaves_nothing_for_the_garbage_collector(clip: ClipFolder) -> None:
    """MEM: side data without a name in PyAV (EXIF) is freed too."""
    data = with_exif(clip("image.jpg").read_bytes())
    assert probe(data).rotation == 90
    with no_collection():
        assert decode_some(data)
        probe(data)
        assert gc.collect() == 0


@pytest.mark.parametrize("name", ["h264_open_gop.mp4", "h264_one_gop.mp4", "mpeg2.mpg"])
def test_a_damaged_clip_leaves_nothing_for_the_garbage_collector(clip: ClipFolder, name: str) -> None:
    """MEM: this also holds if decoding fails or succeeds at the second attempt."""
    data = damaged(clip(name).read_bytes())
    decode_some(data)
    with no_collection():
        went_well = {decode_some(data, start) for start in range(0, 40, 3)}
        with contextlib.suppress(ProbeError):
            probe(data)
        assert gc.collect() == 0
    assert False in went_well


@pytest.mark.parametrize("name", KINDS)
def test_hundreds_of_decodes_leak_no_memory(clip: ClipFolder, name: str) -> None:
    """MEM: the memory allocated by the C library is the same after hundreds of further decodes."""
    data, draw = clip(name).read_bytes(), random.Random(name)
    num_frames = probe(data).num_frames

    def decode() -> None:
        assert decode_some(data, draw.randrange(num_frames))

    check_no_loss(decode, 300)


def test_probes_and_failures_leak_no_memory(clip: ClipFolder) -> None:
    """MEM: this also holds for probing and for a clip that ends early."""
    whole = clip("h264_open_gop.mp4").read_bytes()
    check_no_loss(lambda: probe(whole), 200)
    cut = clip("h264_open_gop.mkv").read_bytes()[:-3000]
    check_no_loss(lambda: decode_some(cut), 200)


def check_no_loss(call: Callable[[], object], times: int) -> None:
    for _ in range(times // 2):  # warm up allocators and caches
        call()
    before = in_use()
    for _ in range(times):
        call()
    assert (in_use() - before) / times < LOST_BYTES


def in_use() -> int:
    """Return the number of bytes allocated by the C library, without its free memory."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        pytest.skip("this C library does not report its allocated memory (mallinfo2)")
    library.mallinfo2.restype = MallocInfo
    gc.collect()
    info = library.mallinfo2()
    return int(info.hblkhd + info.uordblks)
