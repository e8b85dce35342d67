"""Tests of frames that are coded as two fields."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamvid.errors import DecodeError, ProbeError
from streamvid.video.decode.file import decode_pictures
from streamvid.video.picture import PictureFormat
from streamvid.video.probe import probe
from tests.video.paff import HEIGHT, WIDTH, Picture, top_value, transport_stream

_FORMAT = PictureFormat(HEIGHT, WIDTH, "yuv420p")


@st.composite
def streams(draw: st.DrawFn) -> list[Picture]:
    """Draw groups of one reference picture and up to two pictures that are displayed before it."""
    pictures = [Picture(0, is_reference=True, is_fields=draw(st.booleans()), is_idr=True)]
    for num_between in draw(st.lists(st.integers(0, 2), min_size=1, max_size=8)):
        last = len(pictures)
        order = [last + num_between, *range(last, last + num_between)]
        pictures += [Picture(display, display == order[0], draw(st.booleans())) for display in order]
    if not any(picture.is_fields for picture in pictures):
        pictures[0] = Picture(0, is_reference=True, is_fields=True, is_idr=True)
    return pictures


def luma(data: bytes, start: int, num_frames: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Return the luma of each line of `num_frames` frames, after checking that it is constant along the line."""
    out = np.zeros((num_frames, _FORMAT.num_bytes), np.uint8)
    decode_pictures(data, start, out, _FORMAT)
    lines = out[:, : HEIGHT * WIDTH].reshape(num_frames * HEIGHT, WIDTH)
    assert (lines == lines[:, :1]).all()
    return lines[:, 0].reshape(num_frames, HEIGHT)


def expected(pictures: list[Picture], start: int, num_frames: int) -> list[list[int]]:
    found = []
    for picture in sorted(pictures, key=lambda picture: picture.display)[start : start + num_frames]:
        top = top_value(picture.display)
        found.append([top, top + 3 * picture.is_fields] * (HEIGHT // 2))
    return found


@given(pictures=streams(), data=st.data())
def test_two_fields_in_separate_packets_are_one_frame(pictures: list[Picture], data: st.DataObject) -> None:
    """SAMPLE-2: frames and field pairs are mixed, and any window contains every line of its frames."""
    stream = transport_stream(pictures)
    info = probe(stream, verify=True)
    assert info.num_frames == len(pictures)
    assert np.diff(info.timestamps).tolist() == [3600] * (len(pictures) - 1)
    start = data.draw(st.integers(0, len(pictures) - 1))
    num_frames = data.draw(st.integers(1, len(pictures) - start))
    assert luma(stream, start, num_frames).tolist() == expected(pictures, start, num_frames)


@given(pictures=streams(), data=st.data())
def test_a_lost_field_never_shifts_frames(pictures: list[Picture], data: st.DataObject) -> None:
    """SAMPLE-2: a stream that lacks one packet is rejected, or each of its frames is at the right time."""
    num_packets = sum(1 + picture.is_fields for picture in pictures)
    stream = transport_stream(pictures, left_out=data.draw(st.integers(1, num_packets - 1)))
    try:
        info = probe(stream)
        lines = luma(stream, 0, info.num_frames)
    except (ProbeError, DecodeError):
        return
    for time, frame in zip(info.timestamps, lines, strict=True):
        top = top_value((time - 36000) // 3600)
        assert {*frame.tolist()} & {top, top + 3}


@pytest.mark.parametrize("size", [3, 40, 200])
@given(data=st.data())
def test_damaged_parameters_give_frames_or_a_rejection(size: int, data: st.DataObject) -> None:
    """SAFE-1: any bytes in the headers."""
    stream = bytearray(transport_stream([Picture(0, True, True, True), Picture(1, True, True)]))
    at = stream.find(b"\0\0\1\x67") + data.draw(st.integers(0, 40))
    stream[at : at + size] = data.draw(st.binary(min_size=size, max_size=size))
    with contextlib.suppress(ProbeError):
        probe(bytes(stream))
