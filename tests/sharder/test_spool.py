"""Tests of objects that are read as files: which bytes are fetched, and that results equal those of local files."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamvid.errors import ProbeError, StorageError
from streamvid.sharder.source.media import Media
from streamvid.sharder.source.spool import Spans, SpooledFile
from streamvid.storage import StorageOptions, open_store
from streamvid.video.encode.clip import encode_clip
from streamvid.video.encode.profiles import Encoding
from streamvid.video.probe import probe
from streamvid.video.survey.audio_span import read_audio_span
from tests.clips import encode, frames_of
from tests.sounding import chirps, sounding
from tests.video.clips import VIDEO_NAMES, ClipFolder

OPTIONS = StorageOptions()
STORE = open_store("memory://spool", OPTIONS)


def media_of(data: bytes, name: str = "clip") -> Media:
    STORE.put(name, data)
    state = STORE.state(name)
    assert state is not None
    return Media(f"memory://spool/{name}", name, len(data), state.version, OPTIONS)


def outcome(source: Any) -> Any:
    try:
        return probe(source)
    except ProbeError as error:
        return str(error)


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda ends: (min(ends), max(ends))), max_size=8)


@given(SPANS, SPANS, st.integers(0, 60), st.integers(0, 60))
def test_spans_are_sets_of_bytes(first: list[Any], added: list[Any], start: int, end: int) -> None:
    spans = Spans(first)
    for span in added:
        spans.add(*span)
    there = {at for span in [*first, *added] for at in range(*span)}
    missing = spans.missing(start, end)
    assert sorted(at for span in missing for at in range(*span)) == [n for n in range(start, end) if n not in there]
    assert all(begin < stop for begin, stop in missing)


@settings(max_examples=30)
@given(st.integers(1, 3_000_000), st.lists(st.tuples(st.integers(0, 3_000_000), st.integers(0, 400_000)), max_size=12))
def test_reads_give_the_bytes_and_fetch_none_twice(num_bytes: int, reads: list[tuple[int, int]]) -> None:
    """FETCH-2: this holds for any order of seeks."""
    data = random.Random(num_bytes).randbytes(num_bytes)
    with SpooledFile(media_of(data), None) as file:
        for position, count in reads:
            assert file.seek(position) == position
            assert file.read(count) == data[position : position + count]
        assert file.bytes_read <= num_bytes
        file.seek(0)
        assert file.read() == data
        assert file.bytes_read == num_bytes


def late_index(num_frames: int = 720) -> bytes:
    """Return half a minute and many MB of noise with a key frame every two seconds and the index at the end."""
    noise = np.random.default_rng(1).integers(0, 256, (24, 112, 192, 3), np.uint8)
    pictures = noise[np.arange(num_frames) % len(noise)]
    data = encode(pictures, options={"g": "48", "bf": "2", "crf": "14", "preset": "ultrafast"}, numbered=False)
    assert data.find(b"moov") > len(data) * 0.99
    return data


def test_an_mp4_with_its_index_at_the_end_is_probed_by_head_and_tail() -> None:
    """Less than a twentieth of the file is read, with at most one request per key frame and the same result."""
    data = late_index()
    assert len(data) > 10 * 2**20
    media = media_of(data)
    before = media.place[0].stats().num_requests
    with SpooledFile(media, None) as file:
        assert probe(file) == probe(data)
        assert file.bytes_read < len(data) / 20
        assert media.place[0].stats().num_requests - before <= 720 // 48 + 3


def test_a_verified_object_is_read_once() -> None:
    """Every frame is decoded, in two passes over the file, and no byte is fetched twice."""
    data = late_index(24)
    with SpooledFile(media_of(data), None) as file:
        assert probe(file, verify=True) == probe(data, verify=True)
        assert file.bytes_read == len(data)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> ClipFolder:
    return ClipFolder(tmp_path_factory.mktemp("clips"))


@pytest.mark.parametrize("name", VIDEO_NAMES)
def test_probing_gives_the_same_result_as_for_a_local_file(clip: ClipFolder, name: str) -> None:
    """SHARD-1: this holds for every kind of clip, complete, truncated or damaged."""
    whole = clip(name).read_bytes()
    rng = random.Random(name)
    damaged = bytearray(whole)
    for _ in range(10):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    for data in (whole, whole[: len(whole) * 2 // 3]):
        with SpooledFile(media_of(data), None, first_bytes=1024) as file:
            assert outcome(file) == outcome(data)
            assert file.error is None
    with SpooledFile(media_of(bytes(damaged)), None, first_bytes=1024) as file:
        outcome(file)  # a damaged packet that a local probe reads may be skipped here


def test_a_window_is_encoded_from_the_same_frames() -> None:
    """SHARD-1: native clips of objects equal those of files."""
    data = encode(frames_of("bikes", 96, 64, 60))
    chosen = {"height": 64, "width": 96, "encoding": Encoding("h264"), "start": 20, "num_frames": 17}
    with SpooledFile(media_of(data), None, first_bytes=1024) as file:
        assert encode_clip(file, **chosen).data == encode_clip(data, **chosen).data  # type: ignore[arg-type]


def test_audio_of_a_remote_file_equals_that_of_a_local_file() -> None:
    """SHARD-1: the file is read at two positions at once."""
    data = sounding(60, chirps(2.5, 48_000), codec="aac")
    chosen = {"height": 64, "width": 96, "encoding": Encoding("h264"), "start": 30, "num_frames": 17, "audio": "opus"}
    with SpooledFile(media_of(data), None, first_bytes=1024) as file:
        assert read_audio_span(file) == read_audio_span(data)
        assert encode_clip(file, **chosen).data == encode_clip(data, **chosen).data  # type: ignore[arg-type]


def test_a_missing_working_directory_does_not_reject_the_object(tmp_path: Path) -> None:
    """SHARD-3: a local disk that fails is not a reason to reject a source."""
    with pytest.raises(StorageError, match="use another disk .work.work_dir, --work-dir"):
        SpooledFile(media_of(b"x"), tmp_path / "not" / "there")
