"""Tests that the same calls have the same outcome on a disk, in memory, in moto and in Ceph RGW."""

from __future__ import annotations

import hashlib
import itertools
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamvid.errors import StorageError
from streamvid.storage import MAX_RANGE_BYTES, Store, check_relative, open_store
from streamvid.storage.ranges import GAP_BYTES, join_ranges
from tests.servers import S3Env, S3Server

KINDS = ("local", "memory", "moto", "rgw")
NAMES = (
    "plain",
    "with space",
    " spaces around ",
    "a+b",
    "a%20b%",
    "what?x=1&y",
    "a#b",
    "k=v;w,x:y@z",
    "é/ü/😀",
    "quote'\"[x](y){z}|<&amp;>*!$^`~",
    ".hidden",
    "deep/er/.and/there.tar",
    "-" * 200,
    "/".join(["long" * 20] * 8),
)
BODY = hashlib.shake_256(b"body").digest(3 * MAX_RANGE_BYTES + 12345)


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path, s3_env: S3Env) -> Iterator[Store]:
    """Empty store below a prefix that must be quoted."""
    kind = request.param
    if kind == "local":
        yield open_store(tmp_path / "a store")
    elif kind == "memory":
        yield open_store(f"memory://{uuid.uuid4().hex}/a store")
    else:
        server: S3Server = request.getfixturevalue({"moto": "moto_server"}.get(kind, kind))
        s3_env(server)
        yield open_store(f"s3://{server.new_bucket()}/a store+%20")


def listed(store: Store, folder: str = "") -> dict[str, int]:
    return {state.path: state.num_bytes for state in store.files(folder)}


def part(store: Store, path: str, offset: int, num_bytes: int) -> bytes:
    buffer = bytearray(num_bytes)
    store.read_ranges(path, [(offset, memoryview(buffer))])
    return bytes(buffer)


def test_any_name_can_be_put_read_created_listed_and_removed(store: Store) -> None:
    """FETCH-2."""
    for name in NAMES:
        body = name.encode()
        assert store.create(name, body)
        assert not store.create(name, b"another")
        assert store.read(name) == body and store.size(name) == len(body)
        store.put(name, b"new " + body)
        assert store.read(name) == b"new " + body
    assert list(listed(store)) == sorted(NAMES)
    assert listed(store) == {name: len(name.encode()) + 4 for name in NAMES}
    for name in NAMES:
        store.remove(name)
        store.remove(name)
        assert store.size(name) is None
    assert listed(store) == {}


def test_an_empty_file_is_a_file(store: Store) -> None:
    store.put("put", b"")
    assert store.create("created", b"")
    assert not store.create("created", b"")
    assert listed(store) == {"created": 0, "put": 0}
    for name in ("put", "created"):
        state = store.state(name)
        assert state is not None and (state.path, state.num_bytes) == (name, 0)
        assert store.read(name) == b"" and part(store, name, 0, 0) == b""
        with pytest.raises(StorageError, match="ends at byte|ends before byte"):
            part(store, name, 0, 1)


def test_a_missing_file_is_none_or_an_error_that_names_it(store: Store) -> None:
    store.put("folder/file", b"1")
    for name in ("missing", "folder", "folder/missing", "folder/file/below"):
        assert store.state(name) is None and store.size(name) is None
        store.remove(name) if name.endswith("missing") else None
        if name == "folder":  # a local folder exists, but is not a file
            continue
        for read in (lambda name=name: store.read(name), lambda name=name: part(store, name, 0, 1)):
            with pytest.raises(StorageError, match=f"cannot read {name}: "):
                read()
    assert listed(store, "missing") == {} and listed(store, "folder/file") == {}
    assert store.abort_uploads() == store.abort_uploads("folder") == 0


def test_a_folder_does_not_include_names_that_only_start_like_it(store: Store) -> None:
    for name in ("a/1", "a/b/2", "ab/3", "a.4", "a-5"):
        store.put(name, b"x")
    assert list(listed(store, "a")) == ["a/1", "a/b/2"]
    assert list(listed(store, "a/b")) == ["a/b/2"]
    assert list(listed(store)) == ["a-5", "a.4", "a/1", "a/b/2", "ab/3"]


def test_a_local_file_is_moved_in_or_named_in_the_error(store: Store, tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.write_bytes(b"made")
    store.put("x/moved", made)
    assert store.read("x/moved") == b"made" and not made.exists()
    with pytest.raises(StorageError, match="cannot write x/moved"):
        store.put("x/moved", made)
    assert store.read("x/moved") == b"made"


def test_the_version_changes_when_the_file_changes(store: Store) -> None:
    store.put("x", b"first!")
    first = store.state("x")
    assert first is not None and first.version and first == store.state("x")
    buffer = bytearray(6)
    store.read_ranges("x", [(0, memoryview(buffer))], first.version)
    assert buffer == b"first!"
    store.put("x", b"second")
    second = store.state("x")
    assert second is not None and second.version != first.version
    with pytest.raises(StorageError, match="x"):
        store.read_ranges("x", [(0, memoryview(buffer))], first.version)
    store.read_ranges("x", [(0, memoryview(buffer))], second.version)
    assert buffer == b"second" and part(store, "x", 0, 6) == b"second"


@pytest.mark.parametrize("path", ["", ".", "./.", "/x", "../x", "x/../../y", "a\0b", "a\\b"])
def test_paths_outside_a_store_are_refused(store: Store, path: str) -> None:
    """SAFE-1."""
    with pytest.raises(StorageError, match="stay inside"):
        check_relative(path)
    calls = [lambda: store.put(path, b"x"), lambda: store.create(path, b"x"), lambda: store.read(path)]
    calls += [lambda: store.remove(path), lambda: store.state(path), lambda: part(store, path, 0, 1)]
    for call in calls:
        with pytest.raises(StorageError, match="stay inside"):
            call()


@st.composite
def wanted(draw: st.DrawFn, num_bytes: int) -> list[tuple[int, int]]:
    """Draw (offset, size) pairs: few or many, near and far, small ones and some above the maximum request size."""
    ranges = []
    for _ in range(draw(st.integers(0, 8))):
        most = draw(st.sampled_from([0, 1, 100, GAP_BYTES, num_bytes]))
        offset = draw(st.one_of(st.integers(0, num_bytes), st.sampled_from([0, num_bytes, MAX_RANGE_BYTES])))
        ranges.append((offset, draw(st.integers(0, min(most, num_bytes - offset)))))
    return ranges


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_ranges_are_read_in_any_order_and_with_overlaps(store: Store, data: st.DataObject) -> None:
    """FETCH-1."""
    if store.size("large") is None:
        store.put("large", BODY)
    ranges = data.draw(wanted(len(BODY)))
    buffers = [bytearray(num_bytes) for _, num_bytes in ranges]
    store.read_ranges(
        "large", [(offset, memoryview(buffer)) for (offset, _), buffer in zip(ranges, buffers, strict=True)]
    )
    for (offset, num_bytes), buffer in zip(ranges, buffers, strict=True):
        assert buffer == BODY[offset : offset + num_bytes]


def test_a_read_beyond_the_end_is_an_error(store: Store) -> None:
    """FETCH-1: the read raises instead of returning fewer bytes."""
    store.put("x", b"0123456789")
    assert part(store, "x", 0, 10) == b"0123456789" and part(store, "x", 9, 1) == b"9"
    for offset, num_bytes in ((0, 11), (9, 2), (10, 1), (10**9, 1), (0, MAX_RANGE_BYTES * 2)):
        with pytest.raises(StorageError, match=r"cannot read x: the object ends|x ends at byte"):
            part(store, "x", offset, num_bytes)
    kept, beyond = bytearray(4), bytearray(4)
    with pytest.raises(StorageError, match="end"):
        store.read_ranges("x", [(0, memoryview(kept)), (10**9, memoryview(beyond))])


def test_a_path_in_the_page_cache_holds_the_bytes(store: Store) -> None:
    """FETCH-1: a local store may return a path for bytes that it has, other stores never do."""
    store.put("x", b"0123456789")
    path = store.cached_path("x", [(0, 3), (6, 4)])
    if path is not None:
        assert store.is_local and Path(path).is_absolute() and Path(path).read_bytes() == b"0123456789"
    for name, offset in (("missing", 0), ("x", 7), ("x", 10**9)):
        assert store.cached_path(name, [(0, 1), (offset, 4)]) is None


@settings(max_examples=300)
@given(
    ranges=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 700)), max_size=12),
    gap=st.integers(0, 300),
    most=st.integers(1, 500),
)
def test_joined_ranges_cover_all_bytes_within_their_limits(ranges: list[tuple[int, int]], gap: int, most: int) -> None:
    """Requests of at most `most` bytes cover all wanted bytes and span only gaps of at most `gap` bytes."""
    source = hashlib.shake_256(b"source").digest(4000)
    buffers = [bytearray(num_bytes) for _, num_bytes in ranges]
    views = [(offset, memoryview(buffer)) for (offset, _), buffer in zip(ranges, buffers, strict=True)]
    requests = join_ranges(views, gap, most)
    covered = {place for offset, num_bytes in ranges for place in range(offset, offset + num_bytes)}
    for request in requests:
        assert 0 < request.num_bytes <= most
        places = range(request.start, request.end)
        assert places[0] in covered and places[-1] in covered
        runs = [len(list(run)) for is_wanted, run in itertools.groupby(places, covered.__contains__) if not is_wanted]
        assert all(run <= gap for run in runs)
        request.scatter(source[request.start : request.end])
    assert [request.start for request in requests] == sorted(request.start for request in requests)
    assert sum(request.num_bytes_wanted for request in requests) == sum(num_bytes for _, num_bytes in ranges)
    for (offset, num_bytes), buffer in zip(ranges, buffers, strict=True):
        assert buffer == source[offset : offset + num_bytes]
    for first, second in itertools.pairwise(join_ranges(views, gap)):  # without a size limit
        assert second.start - first.end > gap
