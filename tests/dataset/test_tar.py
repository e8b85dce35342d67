"""Tests of tars: written members, refused members, and detected damage."""

from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamvid.dataset.tar import MAX_MEMBER_BYTES, check_member, energon_files, scan_tar, tar_index
from streamvid.errors import ConfigError, IntegrityError
from tests.dataset.samples import BUCKETS, shard_info, tar_bytes

KEYS = st.text("abcXYZ019_-", min_size=1, max_size=57)
SAMPLES = st.lists(
    st.tuples(KEYS, st.fixed_dictionaries({"mp4": st.binary(max_size=1200), "txt": st.binary(max_size=5)})),
    min_size=1, max_size=4, unique_by=lambda sample: sample[0],
)  # fmt: skip


@given(SAMPLES)
def test_members_are_at_the_scanned_offsets(samples: list[tuple[str, dict[str, bytes]]]) -> None:
    data = tar_bytes(samples)
    members = list(scan_tar(io.BytesIO(data)))
    found = [(m.key, m.extension, data[m.offset : m.offset + m.num_bytes]) for m in members]
    assert found == [(key, name, content) for key, parts in samples for name, content in sorted(parts.items())]
    assert tar_bytes(samples) == data
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert [(m.name, m.mtime, m.uid, m.gid, m.mode) for m in tar] == [(m.name, 0, 0, 0, 0o444) for m in members]


@pytest.mark.parametrize(
    ("key", "extension", "num_bytes"),
    [
        ("a.b", "mp4", 0), ("", "mp4", 0), ("a/b", "mp4", 0), ("é", "mp4", 0), ("a b", "mp4", 0), ("../a", "mp4", 0),
        ("a", "MP4", 0), ("a", "", 0), ("a", ".mp4", 0), ("a", "mp4/x", 0), ("a", "mp4", MAX_MEMBER_BYTES + 1),
        ("a" * 97, "mp4", 0),
    ],
)  # fmt: skip
def test_members_that_some_readers_would_lose_are_refused(key: str, extension: str, num_bytes: int) -> None:
    with pytest.raises(ConfigError, match="allowed|fit in a tar header|fit in a tar member"):
        check_member(key, extension, num_bytes)


def test_longest_name_and_nested_extensions_fit() -> None:
    check_member("a" * 96, "mp4", MAX_MEMBER_BYTES)
    check_member("a", "latent.safetensors", 1)


def test_a_sample_with_a_bad_name_is_not_written() -> None:
    with pytest.raises(ConfigError, match="not allowed"):
        tar_bytes([("clip_1.5s", {"mp4": b""})])


DATA = tar_bytes([(f"key-{n}", {"mp4": bytes([n]) * 700, "txt": b"x"}) for n in range(5)])


def test_a_tar_that_ends_early_is_noticed() -> None:
    """A damaged tar is never read as a shorter one."""
    whole = len(list(scan_tar(io.BytesIO(DATA))))
    end = max(m.offset + 512 for m in scan_tar(io.BytesIO(DATA)))
    for cut in range(0, end, 256):
        with pytest.raises(IntegrityError, match="ends at byte|no valid"):
            assert len(list(scan_tar(io.BytesIO(DATA[:cut])))) == whole


@given(st.integers(0, 9), st.integers(0, 511), st.integers(0, 7))
def test_a_flipped_bit_in_a_header_is_noticed(number: int, byte: int, bit: int) -> None:
    member = list(scan_tar(io.BytesIO(DATA)))[number]
    damaged = bytearray(DATA)
    damaged[member.header_offset + byte] ^= 1 << bit
    if byte in (154, 155):  # the padding of the checksum field, which has no meaning
        return
    with pytest.raises(IntegrityError):
        list(scan_tar(io.BytesIO(damaged)))


@pytest.mark.parametrize("kind", ["pax", "gnu", "link", "prefix"])
def test_other_kinds_of_tar_are_refused(kind: str) -> None:
    sink = io.BytesIO()
    formats = {"pax": tarfile.PAX_FORMAT, "gnu": tarfile.GNU_FORMAT}
    with tarfile.open(fileobj=sink, mode="w", format=formats.get(kind, tarfile.USTAR_FORMAT)) as tar:
        info = tarfile.TarInfo({"prefix": "d" * 90 + "/" + "a" * 50}.get(kind, "a" * 150 if kind != "link" else "a"))
        info.type, info.linkname = (tarfile.SYMTYPE, "/etc/passwd") if kind == "link" else (tarfile.REGTYPE, "")
        tar.addfile(info, io.BytesIO())
    with pytest.raises(IntegrityError):
        list(scan_tar(io.BytesIO(sink.getvalue())))


def test_offsets_and_energon_files() -> None:
    members = list(scan_tar(io.BytesIO(DATA)))
    offsets = memoryview(tar_index(members)).cast("Q").tolist()
    assert offsets[:-1] == [m.header_offset for m in members if m.extension == "mp4"]
    assert DATA[offsets[-1] :].strip(b"\0") == b""
    files = energon_files([shard_info(BUCKETS[0], 0, 5, DATA, "index/x", 0)])
    assert sorted(files) == [".nv-meta/.info.json", ".nv-meta/dataset.yaml", ".nv-meta/split.yaml"]
    assert b'"shards/96x64-9f/96x64-9f-000000.tar": 5' in files[".nv-meta/.info.json"]
