"""Tests of local folders as stores and of the accepted URLs."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from streamvid.errors import StorageError, StreamvidError
from streamvid.storage import LocalStore, check_relative, open_store, redact
from tests.clips import ROOT
from tests.processes import run_python


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


def test_a_failed_put_keeps_the_old_file_and_leaves_no_temporary_file(tmp_path: Path) -> None:
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
    """FETCH-1: a read that ends early never returns its bytes."""
    store = LocalStore(tmp_path)
    store.put("x", b"0123456789")
    for offset in (7, 10, 1000):
        with pytest.raises(StorageError, match="ends at byte"):
            store.read_ranges("x", [(offset, memoryview(bytearray(4)))])


def test_an_error_names_the_missing_file(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with pytest.raises(StorageError, match=r"cannot read index/x: No such file"):
        store.read("index/x")
    with pytest.raises(StorageError, match="No such file"):
        store.read_ranges("x", [(0, memoryview(bytearray(1)))])
    with pytest.raises(StorageError, match="Is a directory"):
        os.mkdir(tmp_path / "folder")  # noqa: PTH102
        store.read("folder")


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a\0b", "a\\b", ".."])
def test_paths_outside_the_store_are_refused(tmp_path: Path, path: str) -> None:
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


@pytest.mark.parametrize(
    "url", ["pipe:cat /etc/passwd", "ftp://user:secret@host/x?sig=secret", "file://host/x", "file://[x]/y"]
)
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


CREATE = """
import ctypes, struct, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from streamvid.storage import LocalStore

# Seccomp: the kernel answers EPERM to link (86 on x86-64) and linkat (265; 37 on AArch64), as file systems without links.
calls = {"x86_64": [86, 265], "aarch64": [37]}[sys.argv[2]]
jumps = [(0x15, len(calls) - number, 0, call) for number, call in enumerate(calls)]
program = [(0x20, 0, 0, 0), *jumps, (0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050001)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
filters = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, filters, 0, 0) == 0, ctypes.get_errno()

store = LocalStore(Path(sys.argv[1]))
try:
    (store.root / "b").hardlink_to(store.root / "a")
except PermissionError:
    with ThreadPoolExecutor(8) as threads:
        print(sorted(threads.map(lambda number: store.create("lease.json", b"%d" % number * 1000), range(8))))
"""


def test_one_of_many_creations_succeeds_on_a_file_system_without_links(tmp_path: Path) -> None:
    """SHARD-2: the file of the successful creation is complete, and no temporary file is left."""
    (tmp_path / "a").write_bytes(b"")
    done = run_python(CREATE, tmp_path, platform.machine(), cwd=ROOT)
    assert done.stdout == f"{[False] * 7 + [True]}\n", done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "lease.json"]
    data = (tmp_path / "lease.json").read_bytes()
    assert data == data[:1] * 1000


INTERRUPTED = """
import os, random, signal, sys
from pathlib import Path
from streamvid.storage import LocalStore

signal.signal(signal.SIGALRM, signal.default_int_handler)
store, choose, before = LocalStore(Path(sys.argv[1])), random.Random(0), len(os.listdir("/proc/self/fd"))
for _ in range(3000):
    try:
        signal.setitimer(signal.ITIMER_REAL, choose.uniform(2e-6, 1e-4))
        for _ in range(5):
            store.read_ranges("a", [(0, memoryview(bytearray(10)))])
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        pass
    signal.setitimer(signal.ITIMER_REAL, 0)
print(len(os.listdir("/proc/self/fd")) - before)
"""


def test_an_interrupted_read_leaves_no_file_open(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(10))
    assert run_python(INTERRUPTED, tmp_path).stdout == "0\n"
