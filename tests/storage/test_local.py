"""A folder as a store, and what a URL may be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from streamvid.errors import StorageError, StreamvidError
from streamvid.storage import LocalStore, check_relative, open_store, redact


def test_put_read_and_remove(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "deep" / "store")
    assert store.size("a/b.bin") is None
    store.put("a/b.bin", b"0123456789")
    store.put("a/b.bin", b"abcdefghij")
    assert store.size("a/b.bin") == 10
    assert store.read("a/b.bin") == b"abcdefghij"
    buffer = bytearray(4)
    store.read_ranges("a/b.bin", [(3, memoryview(buffer))])
    assert buffer == b"defg"
    store.remove("a/b.bin")
    store.remove("a/b.bin")
    assert store.size("a/b.bin") is None


def test_put_moves_a_file_in(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    (tmp_path / "made").write_bytes(b"made")
    store.put("x/made.tar", tmp_path / "made")
    assert store.read("x/made.tar") == b"made"
    assert not (tmp_path / "made").exists()


def test_a_put_that_fails_leaves_the_old_and_no_temporary(tmp_path: Path) -> None:
    """SHARD-2."""
    store = LocalStore(tmp_path)
    store.put("x", b"old")
    with pytest.raises(StorageError, match=r"cannot write x/y"):
        store.put("x/y", b"new")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageError, match="cannot write folder"):
        store.put("folder", b"new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "x"]
    assert store.read("x") == b"old"


def test_a_short_read_is_an_error(tmp_path: Path) -> None:
    """FETCH-1: a read that ends early is never handed on."""
    store = LocalStore(tmp_path)
    store.put("x", b"0123456789")
    for offset in (7, 10, 1000):
        with pytest.raises(StorageError, match="ends at byte"):
            store.read_ranges("x", [(offset, memoryview(bytearray(4)))])


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with pytest.raises(StorageError, match=r"cannot read index/x: No such file"):
        store.read("index/x")
    with pytest.raises(StorageError, match="No such file"):
        store.read_ranges("x", [(0, memoryview(bytearray(1)))])
    with pytest.raises(StorageError, match="Is a directory"):
        os.mkdir(tmp_path / "folder")  # noqa: PTH102
        store.read("folder")


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a\0b", "a\\b", ".."])
def test_no_path_leaves_the_store(tmp_path: Path, path: str) -> None:
    """SAFE-1."""
    with pytest.raises(StorageError, match="stay inside"):
        check_relative(path)
    for use in (LocalStore(tmp_path).size, LocalStore(tmp_path).read, LocalStore(tmp_path).remove):
        with pytest.raises(StorageError, match="stay inside"):
            use(path)
    with pytest.raises(StorageError, match="stay inside"):
        LocalStore(tmp_path).put(path, b"")


@pytest.mark.parametrize("spelling", ["{path}", "file://{path}", "file://localhost{path}", "FILE://{path}"])
def test_urls_of_one_folder(tmp_path: Path, spelling: str) -> None:
    """FETCH-2."""
    assert open_store(spelling.format(path=tmp_path)) == LocalStore(tmp_path)
    assert open_store(tmp_path) == LocalStore(tmp_path)


def test_file_urls_are_unquoted(tmp_path: Path) -> None:
    folder = tmp_path / "with space é"
    assert open_store(folder.as_uri()) == LocalStore(folder)


@pytest.mark.parametrize("url", ["pipe:cat /etc/passwd", "ftp://user:secret@host/x?sig=secret", "file://host/x"])
def test_other_urls_are_refused_without_their_secrets(url: str) -> None:
    """SAFE-1."""
    with pytest.raises(StreamvidError) as error:
        open_store(url)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://key:secret@bucket/a?X-Amz-Signature=1#f", "s3://bucket/a"),
        ("http://user:pw@host:8080/x?y", "http://host:8080/x"),
        ("/plain/path?x", "/plain/path?x"),
        ("s3:/key:secret/more@bucket/a", "s3:/bucket/a"),
        ("//key:secret@bucket/a", "//bucket/a"),
        ("./s3:/folder:1/a@2x", "./s3:/folder:1/a@2x"),
        ("clips:1/a@2x", "clips:1/a@2x"),
        ("//server/share/a@2x", "//server/share/a@2x"),
    ],
)
def test_redact(url: str, shown: str) -> None:
    assert redact(url) == shown
