"""Tests of the stored packet index: it round-trips, it is small, and any other data raises an IntegrityError."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamvid.dataset.packets import PacketTables, encode_packets, pack_stream, unpack_stream
from streamvid.errors import DecodeError, IntegrityError
from streamvid.video.audio.index import AudioIndex
from streamvid.video.audio.stream import AudioStreamInfo
from streamvid.video.clip_index import KEY, SHOWN, ClipIndex, index_clip
from streamvid.video.stream_info import StreamInfo
from tests.clips import encode, frames_of

NAMES = ("info", "times", "offsets", "sizes", "flags", "checksums")
WHERE = "DATASET: the packets of SHARD in FILE"

INFOS = st.builds(
    StreamInfo,
    codec=st.sampled_from(["h264", "hevc", "av1", "no such codec", 'quotes " and \u00e4']),
    extradata=st.binary(max_size=80),
    coded_width=st.integers(1, 2**31 - 1),
    coded_height=st.integers(1, 2**31 - 1),
    pixel_format=st.sampled_from(["yuv420p", "gbrp"]),
    sample_aspect_ratio=st.tuples(st.integers(1, 2**31 - 1), st.integers(1, 2**31 - 1)),
    rotation=st.sampled_from([0, 90, 180, 270]),
    flip=st.booleans(),
    color=st.tuples(*[st.integers(0, 18)] * 4),
    reorder_depth=st.integers(0, 16),
)


@st.composite
def clips(draw: st.DrawFn) -> ClipIndex:
    """Draw any valid clip index, with packets at any offset and time."""
    info = draw(INFOS)
    count = draw(st.integers(1, 90))
    times = draw(st.lists(st.integers(-(2**62), 2**62 - 1), min_size=count, max_size=count))
    offsets = draw(st.lists(st.integers(0, 2**61), min_size=count, max_size=count))
    sizes = draw(st.lists(st.integers(1, 2**31 - 1), min_size=count, max_size=count))
    flags = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    flags[0] |= KEY
    since, num_segments = 0, 0
    for flag in flags:
        since = 0 if flag & KEY else since + 1
        num_segments += since % 32 == 0
    digests = draw(st.binary(min_size=8 * num_segments, max_size=8 * num_segments))
    return clip_of(info, times, offsets, sizes, flags, digests)


def clip_of(
    info: StreamInfo,
    times: Sequence[int],
    offsets: Sequence[int],
    sizes: Sequence[int],
    flags: Sequence[int],
    digests: bytes,
) -> ClipIndex:
    return ClipIndex(
        info,
        np.array(times, np.int64),
        np.array(offsets, np.int64),
        np.array(sizes, np.int64),
        np.array(flags, np.uint8),
        np.frombuffer(digests, np.uint8).reshape(-1, 8),
    )


INFO = StreamInfo("h264", b"\x01header", 64, 48, "yuv420p", (1, 1), 0, False, (2, 0, 2, 2), 2)
SMALL = clip_of(INFO, [0, 1024, 512], [48, 148, 170], [100, 20, 30], [3, 2, 2], b"8 bytes.")


def tables(data: bytes, num_clips: int, digest: bytes | None = None) -> PacketTables:
    return PacketTables(data, hashlib.sha256(data).digest() if digest is None else digest, num_clips, WHERE)


def assert_equal(found: ClipIndex | None, expected: ClipIndex | None) -> None:
    if found is None or expected is None:
        assert found is expected
        return
    assert found.info == expected.info and hash(found.info) == hash(expected.info)
    for name in NAMES[1:]:
        left, right = getattr(found, name), getattr(expected, name)
        assert left.dtype == right.dtype and left.tolist() == right.tolist(), name


@st.composite
def sounds(draw: st.DrawFn) -> AudioIndex:
    """Draw any valid audio index, with packets so far apart that each is its own segment."""
    count = draw(st.integers(1, 40))

    def numbers(least: int, most: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.array(draw(st.lists(st.integers(least, most), min_size=count, max_size=count)), np.int64)

    return AudioIndex(
        AudioStreamInfo("flac", draw(st.binary(max_size=60)), draw(st.integers(1000, 700_000)), 2, "stereo"),
        positions=numbers(-(2**61), 2**61),
        offsets=np.arange(count) * 2**32,
        sizes=numbers(1, 2**31 - 1),
        heads=numbers(0, 2**31 - 1),
        counts=numbers(0, 2**31 - 1),
        checksums=np.frombuffer(draw(st.binary(min_size=8 * count, max_size=8 * count)), np.uint8).reshape(-1, 8),
    )


@settings(max_examples=40)
@given(st.lists(st.tuples(st.none() | clips(), st.none() | sounds()), max_size=5), st.fractions(1, 10**6))
def test_audio_is_stored_with_its_video(
    written: list[tuple[ClipIndex | None, AudioIndex | None]], base: Fraction
) -> None:
    """FORMAT: audio is stored with its video, or alone as for audio files."""
    pictures = [
        None if clip is None else replace(clip, time_base=1 / base.limit_denominator(1001)) for clip, _ in written
    ]
    found = tables(encode_packets(pictures, [sound for _, sound in written]), len(written))
    for row, (clip, (_, sound)) in enumerate(zip(pictures, written, strict=True)):
        assert_equal(found.clip(row), clip)
        read = found.audio(row)
        if sound is None:
            assert read is None
            continue
        assert read is not None and read.info == sound.info
        for name in ("positions", "offsets", "sizes", "heads", "counts", "checksums"):
            assert getattr(read, name).tolist() == getattr(sound, name).tolist(), name
        stored = found.clip(row)
        assert (stored and stored.time_base) == (clip and clip.time_base)


@settings(max_examples=60)
@given(st.lists(st.none() | clips(), max_size=6))
def test_clips_round_trip(written: list[ClipIndex | None]) -> None:
    """FORMAT: rows can be read in any order and repeatedly, also between clips without an index."""
    data = encode_packets(written)
    assert encode_packets(written) == data
    found = tables(data, len(written))
    for row in [*range(len(written)), *reversed(range(len(written)))]:
        assert_equal(found.clip(row), written[row])


def test_an_index_takes_few_bytes_per_frame() -> None:
    """The documented size: less than 8 bytes per packet plus 400 per clip, for shards of real clips."""
    real = [index_clip(encode(frames_of("bikes", 96, 64, 40 + i), fps=24)) for i in range(16)]
    num_packets = sum(len(clip.times) for clip in real if clip is not None)
    data = encode_packets(real)
    assert num_packets > 600
    assert len(data) < 8 * num_packets + 400 * len(real), (len(data), num_packets)
    assert tables(data, 16).num_bytes < 40 * num_packets + 1000 * len(real)


def test_a_table_with_another_checksum_is_refused() -> None:
    """SHARD-2: the checksum is verified before the table is parsed."""
    data = encode_packets([SMALL])
    for other, digest in ((data[:-1], hashlib.sha256(data).digest()), (b"", b""), (data, bytes(32))):
        with pytest.raises(IntegrityError, match=f"{WHERE}: checksum mismatch; copy"):
            tables(other, 1, digest)


@pytest.mark.parametrize("num_clips", [0, 1, 3])
def test_a_table_with_another_number_of_clips_is_refused(num_clips: int) -> None:
    with pytest.raises(IntegrityError, match="the table has 2 rows with|the table unpacks to"):
        tables(encode_packets([SMALL, None]), num_clips)


# Tables with a correct checksum and hostile content (SAFE-1).


def rewritten(
    change: Callable[[dict[str, list[Any]]], None],
    clips: Sequence[ClipIndex | None] = (SMALL, SMALL),
    audios: Sequence[AudioIndex | None] = (),
) -> bytes:
    """Return the table of these clips with changed values in its columns."""
    with pa.ipc.open_stream(unpack_stream(encode_packets(clips, audios), len(clips))) as reader:
        table = reader.read_all()
    columns = table.to_pydict()
    change(columns)
    return written(pa.table(columns, schema=table.schema))


def written(table: pa.Table, compression: str | None = None) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table)
    return pack_stream(sink.getvalue())


def every_clip(data: bytes, num_clips: int = 2) -> list[ClipIndex | None]:
    """Return all clips of a table after reading every window of each."""
    found = tables(data, num_clips)
    clips = [found.clip(row) for row in range(num_clips)]
    for clip in clips:
        if clip is not None:
            for start in range(clip.num_frames):
                window = clip.window(start, 1)
                assert (
                    0
                    <= window.first_byte
                    < window.first_byte + window.num_bytes
                    == window.first_byte + max(piece[1] for piece in window.pieces)
                )
                assert window.first_byte + window.num_bytes <= clip.num_bytes
    return clips


def test_foreign_tables_are_refused() -> None:
    """SAFE-1: columns that are missing, superfluous, renamed or of another type are refused."""
    with pa.ipc.open_stream(unpack_stream(encode_packets([SMALL, None]), 2)) as reader:
        table = reader.read_all()
    foreign = [
        table.drop_columns(["flags"]),
        table.append_column("more", pa.array([1, 2])),
        table.rename_columns([name.replace("time_step", "step") for name in table.column_names]),
        table.set_column(3, "size", pa.array([[1], [2]], pa.list_(pa.int64()))),
        pa.table({}),
    ]
    for other in foreign:
        with pytest.raises(IntegrityError, match=f"{WHERE} cannot be read"):
            tables(written(other), 2)


CHANGES: dict[str, Callable[[dict[str, list[Any]]], None]] = {
    "a negative place": lambda c: c["gap"].__setitem__(1, [-48, 0, 2]),
    "a place before the file": lambda c: c["gap"].__setitem__(1, [48, -(2**40), 2]),
    "a place beyond 64 bits": lambda c: c["gap"].__setitem__(1, [2**63 - 120, 0, 2]),
    "places that wrap around": lambda c: c["gap"].__setitem__(1, [2**62, 2**62, 2**62]),
    "a size of 0": lambda c: c["size"].__setitem__(1, [100, 0, 30]),
    "a negative size": lambda c: c["size"].__setitem__(1, [100, -20, 30]),
    "fewer sizes": lambda c: c["size"].__setitem__(1, [100, 20]),
    "fewer flags": lambda c: c["flags"].__setitem__(1, [3, 2]),
    "fewer times": lambda c: c["time_step"].__setitem__(1, [0]),
    "no packets": lambda c: [c[name].__setitem__(1, []) for name in ("time_step", "gap", "size", "flags")],
    "no key packet": lambda c: c["flags"].__setitem__(1, [2, 2, 2]),
    "no checksums": lambda c: c["checksums"].__setitem__(1, b""),
    "part of a checksum": lambda c: c["checksums"].__setitem__(1, b"12345"),
    "an extra checksum": lambda c: c["checksums"].__setitem__(1, b"8 bytes." * 2),
    "null for a list": lambda c: c["gap"].__setitem__(1, None),
    "null for checksums": lambda c: c["checksums"].__setitem__(1, None),
    "null in a list": lambda c: c["size"].__setitem__(1, [100, None, 30]),
    "null among flags": lambda c: c["flags"].__setitem__(1, [3, None, 2]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_impossible_numbers_are_refused(name: str) -> None:
    """SAFE-1: the error names the row, and other rows stay readable, or it names a table whose columns do not match."""
    data = rewritten(CHANGES[name])
    with pytest.raises(IntegrityError, match=f"{WHERE}(, row 1: | cannot be read )"):
        tables(data, 2).clip(1)
    if name not in {
        "fewer sizes",
        "fewer flags",
        "fewer times",
        "null for a list",
        "null in a list",
        "null among flags",
    }:
        assert_equal(tables(data, 2).clip(0), SMALL)


SOUND = AudioIndex(
    AudioStreamInfo("flac", b"", 48000, 2, "stereo"),
    *(np.array(values, np.int64) for values in ([0, 4096], [400, 900], [90, 80], [0, 0], [4096, 4096])),
    np.zeros((2, 8), np.uint8),
)
WRONG_SOUNDS: dict[str, Callable[[dict[str, list[Any]]], None]] = {
    "a negative place": lambda c: c["audio_gap"].__setitem__(1, [-400, 410]),
    "a size of 0": lambda c: c["audio_size"].__setitem__(1, [90, 0]),
    "a negative head": lambda c: c["audio_head"].__setitem__(1, [-1, 0]),
    "a negative count": lambda c: c["audio_count"].__setitem__(1, [4096, -1]),
    "a position beyond 64 bits": lambda c: c["audio_position_step"].__setitem__(1, [2**63 - 1, 9]),
    "fewer counts": lambda c: c["audio_count"].__setitem__(1, [4096]),
    "no packets": lambda c: [
        c[f"audio_{n}"].__setitem__(1, []) for n in ("position_step", "gap", "size", "head", "count")
    ],
    "null for a list": lambda c: c["audio_gap"].__setitem__(1, None),
    "no checksums": lambda c: c["audio_checksums"].__setitem__(1, b""),
    "null for checksums": lambda c: c["audio_checksums"].__setitem__(1, None),
    "no stream": lambda c: c["audio_stream"].__setitem__(1, "{}"),
    "an invalid codec": lambda c: c["audio_stream"].__setitem__(1, SOUND.info.to_json().replace('"flac"', "[1]")),
    "a huge rate": lambda c: c["audio_stream"].__setitem__(1, SOUND.info.to_json().replace("48000", "9" * 40)),
}


@pytest.mark.parametrize("name", WRONG_SOUNDS)
def test_impossible_audio_is_refused(name: str) -> None:
    """SAFE-1: reading the audio is an error, and the video stays readable."""
    data = rewritten(WRONG_SOUNDS[name], audios=(SOUND, SOUND))
    with pytest.raises(IntegrityError, match=f"{WHERE}, row 1, audio: "):
        tables(data, 2).audio(1)
    assert_equal(tables(data, 2).clip(1), SMALL)


@pytest.mark.parametrize("base", ["", "0", "-1/9", "1/0", "x", "1e9", "1/99999999999", "9" * 50])
def test_impossible_time_bases_are_refused(base: str) -> None:
    data = rewritten(lambda columns: columns["time_base"].__setitem__(1, base))
    with pytest.raises(IntegrityError, match=f"{WHERE}, row 1: "):
        tables(data, 2).clip(1)


def stream_text(**values: Any) -> str:
    return json.dumps(json.loads(INFO.to_json()) | values)


STREAMS = {
    "not JSON": "{",
    "empty": "",
    "a list": "[]",
    "a number": "7",
    "deeply nested": "[" * 100_000,
    "a missing field": json.dumps({"codec": "h264"}),
    "an extra field": stream_text(more=1),
    "a string for a number": stream_text(coded_width="64"),
    "half a pixel": stream_text(coded_width=64.5),
    "an infinite color": stream_text(color=[float("inf"), 1, 1, 1]),
    "no size": stream_text(coded_height=0),
    "a negative size": stream_text(coded_width=-64),
    "a huge size": stream_text(coded_width=2**40),
    "a rotation by 45 degrees": stream_text(rotation=45),
    "a zero in the aspect ratio": stream_text(sample_aspect_ratio=[0, 1]),
    "half an aspect ratio": stream_text(sample_aspect_ratio=[1]),
    "no header": stream_text(extradata="no hex"),
    "a huge header": stream_text(extradata="00" * 20_000),
    "an invalid codec": stream_text(codec=["h264"]),
    "an invalid pixel format": stream_text(pixel_format=None),
    "an invalid flip": stream_text(flip="no"),
    "three color values": stream_text(color=[1, 1, 1]),
    "a negative color": stream_text(color=[1, -1, 1, 1]),
    "a huge color": stream_text(color=[1, 1, 2**40, 1]),
    "a negative depth": stream_text(reorder_depth=-1),
    "an invalid depth": stream_text(reorder_depth="deep"),
    "a huge depth": stream_text(reorder_depth=10**30),
}


@pytest.mark.parametrize("name", STREAMS)
def test_impossible_streams_are_refused(name: str) -> None:
    """SAFE-1: the error is raised on reading, not later in a decoder."""
    data = rewritten(lambda columns: columns["stream"].__setitem__(1, STREAMS[name]))
    with pytest.raises(IntegrityError, match=f"{WHERE}, row 1: "):
        tables(data, 2).clip(1)


@settings(max_examples=150)
@given(st.data())
def test_garbage_with_a_correct_checksum_is_an_error_or_an_index(data: st.DataObject) -> None:
    """SAFE-1: a compressed or uncompressed table with changed bytes, possibly truncated, raises no other exception."""
    outer = data.draw(st.booleans())
    with pa.ipc.open_stream(unpack_stream(encode_packets([SMALL, SMALL]), 2)) as reader:
        table = written(reader.read_all())
    broken = bytearray(table if outer else unpack_stream(table, 2))
    for _ in range(data.draw(st.integers(1, 6))):
        broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    broken = broken[: data.draw(st.sampled_from([len(broken), len(broken) - 9, len(broken) // 2]))]
    try:
        every_clip(bytes(broken) if outer else pack_stream(bytes(broken)))
    except (IntegrityError, DecodeError):
        return


@given(st.binary(max_size=400))
def test_data_that_is_not_a_table_is_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError, match="cannot be read"):
        tables(data, 2)


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=3, max_size=3),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=3, max_size=3),
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=3, max_size=3),
    st.lists(st.integers(0, 255), min_size=3, max_size=3),
)
def test_any_numbers_are_an_error_or_inside_the_clip(
    steps: list[int], gaps: list[int], sizes: list[int], flags: list[int]
) -> None:
    """SAFE-1: no offset is negative or beyond the end that is checked against the clip's size."""

    def change(columns: dict[str, list[Any]]) -> None:
        for name, values in (("time_step", steps), ("gap", gaps), ("size", sizes), ("flags", flags)):
            columns[name][1] = values

    try:
        every_clip(rewritten(change))
    except (IntegrityError, DecodeError):
        return


def test_frames_are_counted_only_by_the_flag() -> None:
    """A clip whose packets are never shown has no frames and no window."""
    hidden = clip_of(INFO, [0], [0], [9], [KEY], b"8 bytes.")
    found = tables(encode_packets([hidden]), 1).clip(0)
    assert found is not None and found.num_frames == 0
    with pytest.raises(DecodeError, match="the clip has 0"):
        found.window(0, 1)
    assert SMALL.num_frames == 3 and SMALL.flags[1] == SHOWN


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_table_that_unpacks_to_more_than_it_claims_is_refused(codec: str) -> None:
    """SAFE-1: a few kilobytes must not expand to gigabytes, neither in the table itself nor in its buffers."""
    with pa.ipc.open_stream(unpack_stream(encode_packets([SMALL, SMALL]), 2)) as reader:
        table = reader.read_all()
    with pytest.raises(IntegrityError, match="cannot be read .the stream contains messages other than a schema and"):
        tables(written(table, codec), 2)
    plain = written(table)
    for size in (0, 2**30, 2**63):
        with pytest.raises(IntegrityError, match=f"the table unpacks to {size} bytes; 1 to 100663296 are allowed"):
            tables(size.to_bytes(8, "little") + plain[8:], 2)
