"""Tests of the local cache: correct bytes within its size bound, whatever happens to its users and files."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamvid.errors import ConfigError, StorageError
from streamvid.storage.cache.blocks import BLOCK_BYTES, BlockCache
from tests.storage.cache_user import Remote, num_bytes

ROOT = "streamvid-cache-1"


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Remote:
    """Objects of one byte, exactly two blocks, two blocks and 12,345 bytes, and one block and one byte."""
    folder = tmp_path_factory.mktemp("remote")
    for size in (1, 2 * BLOCK_BYTES, 2 * BLOCK_BYTES + 12_345, BLOCK_BYTES + 1):
        data = random.Random(size).randbytes(size)
        (folder / hashlib.sha256(data).hexdigest()).write_bytes(data)
    return Remote(folder)


def biggest(remote: Remote) -> str:
    return max(remote.objects, key=lambda name: remote.objects[name])


def blocks(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / ROOT).glob("??/*") if not path.name.endswith(".part"))


def parts(folder: Path) -> list[Path]:
    return sorted((folder / ROOT).glob("??/*.part"))


def reopened(folder: Path, max_bytes: int) -> BlockCache:
    """Open the cache without its ledger, so that the files are counted, and check the total."""
    (folder / ROOT / ".ledger").unlink(missing_ok=True)
    cache = BlockCache(folder, max_bytes)
    cache.discard("0" * 64, [])
    assert cache.stats().num_bytes == num_bytes(folder) <= max_bytes
    return cache


@contextlib.contextmanager
def user(folder: Path, remote: Remote, **order: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a cache user in a separate process."""
    order = {"folder": str(folder), "remote": str(remote.folder), "seed": 0, "threads": 1, **order}
    command = [sys.executable, "-m", "tests.storage.cache_user", json.dumps(order, default=str)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    with process:
        try:
            yield process
        finally:
            process.kill()


def ends(process: subprocess.Popen[str]) -> str:
    """Wait until the user exits successfully, having read only correct bytes, and return its stderr."""
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert out.endswith("end\n")
    return err


def wait_until(holds: Callable[[], object]) -> None:
    while not holds():
        time.sleep(0.001)


ACTIONS = st.sampled_from(["read"] * 6 + ["discard", "shorten", "lose", "damage ledger", "lose ledger", "part", "new"])


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.integers(1, 5), st.lists(ACTIONS, min_size=1, max_size=10))
def test_reads_are_correct_in_any_state_of_the_folder(remote: Remote, seed: int, room: int, actions: list[str]) -> None:
    """FETCH-2, FETCH-1: reads return the store's bytes and the bound holds, even if blocks are lost, torn or discarded.

    The ledger's total is never less than the actual size.
    """
    rng = random.Random(seed)
    max_bytes = room * BLOCK_BYTES + rng.choice([0, 1, 12_345])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cache, has_ledger = BlockCache(folder, max_bytes), True
        for action in actions:
            there = blocks(folder)
            ledger = folder / ROOT / ".ledger"
            if action == "read":
                remote.check_some(cache, rng)
            elif action == "new":
                cache = BlockCache(folder, max_bytes)
            elif action == "damage ledger" and ledger.exists():
                ledger.write_bytes(rng.randbytes(rng.choice([0, 5, 28, 100])))
            elif action == "lose ledger":
                ledger.unlink(missing_ok=True)
            elif there:
                path = rng.choice(there)
                harm(cache, action, path, rng)
            assert num_bytes(folder) <= max_bytes
            has_ledger = has_ledger and not action.endswith("ledger")
            assert not has_ledger or cache.stats().num_bytes >= num_bytes(folder)
        remote.check_some(cache, rng)
        reopened(folder, max_bytes)
        assert not parts(folder)


def harm(cache: BlockCache, action: str, path: Path, rng: random.Random) -> None:
    if action == "discard":
        name, _, number = path.name.partition("-")
        cache.discard(name, [(int(number) * BLOCK_BYTES + 5, 1)])
        assert not path.exists()
    elif action == "shorten":
        os.truncate(path, rng.randrange(path.stat().st_size + 1) // 2)
    elif action == "lose":
        path.unlink()
    elif action == "part":
        path.rename(f"{path}.part")


def test_cached_blocks_are_available_to_later_readers(tmp_path: Path, remote: Remote) -> None:
    """Each block is fetched once and completely, with one call per read; a cache hit makes no request to the store."""
    name, calls = biggest(remote), []
    size = remote.objects[name]

    def fetch(asked: Sequence[tuple[int, memoryview]]) -> None:
        calls.append([(offset, len(buffer)) for offset, buffer in asked])
        remote.fetch(name, asked)

    for cache in (BlockCache(tmp_path, 10 * BLOCK_BYTES), BlockCache(tmp_path, 10 * BLOCK_BYTES)):
        for places in ([(size - 5, 5), (3, 10), (BLOCK_BYTES - 1, 2)], [(0, size)], [(size, 0)], []):
            buffers = [(offset, memoryview(bytearray(length))) for offset, length in places]
            cache.read_ranges(name, size, buffers, fetch)
            for offset, buffer in buffers:
                assert buffer == remote.read(name, offset, len(buffer))
    assert calls == [[(0, BLOCK_BYTES), (BLOCK_BYTES, BLOCK_BYTES), (2 * BLOCK_BYTES, 12_345)]]
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.bytes_fetched, stats.evicted) == (6, 0, 0, 0)
    assert stats.bytes_from_cache == size + 17
    assert stats.num_bytes == num_bytes(tmp_path) == size


def test_a_wrong_block_is_fetched_again(tmp_path: Path, remote: Remote) -> None:
    """FETCH-1: the reader detects bytes corrupted on disk; once discarded, the block is fetched from the store."""
    name = biggest(remote)
    cache = BlockCache(tmp_path, 10 * BLOCK_BYTES)
    remote.check(cache, name, [(0, remote.objects[name])])
    path = next(path for path in blocks(tmp_path) if path.name.endswith("-1"))
    with path.open("r+b") as file:
        file.seek(100)
        file.write(bytes(50))
    with pytest.raises(AssertionError, match="wrong bytes"):
        remote.check(cache, name, [(BLOCK_BYTES + 90, 100)])
    cache.discard(name, [(BLOCK_BYTES + 90, 100)])
    assert len(blocks(tmp_path)) == 2
    remote.check(cache, name, [(BLOCK_BYTES + 90, 100)])
    assert len(blocks(tmp_path)) == 3
    assert cache.stats().misses == 4


@pytest.mark.parametrize("size", [0, BLOCK_BYTES - 1, BLOCK_BYTES + 1])
def test_a_block_of_the_wrong_size_is_fetched_again(tmp_path: Path, remote: Remote, size: int) -> None:
    """A file torn by a power loss is replaced even if it contains the requested part."""
    cache = BlockCache(tmp_path, 10 * BLOCK_BYTES)
    remote.check(cache, biggest(remote), [(0, 1)])
    os.truncate(blocks(tmp_path)[0], size)
    remote.check(cache, biggest(remote), [(0, 1)])
    assert cache.stats().misses == 2
    assert blocks(tmp_path)[0].stat().st_size == BLOCK_BYTES


def test_a_ledger_with_too_small_a_total_is_detected(tmp_path: Path, remote: Remote) -> None:
    """Covers a flipped bit in the total and a total from before a power loss."""
    cache, name = BlockCache(tmp_path, 2 * BLOCK_BYTES), biggest(remote)
    remote.check(cache, name, [(0, 1), (BLOCK_BYTES, 1)])
    ledger = tmp_path / ROOT / ".ledger"
    data = bytearray(ledger.read_bytes())
    data[8:16] = bytes(8)
    ledger.write_bytes(data)
    remote.check(cache, name, [(2 * BLOCK_BYTES, 1)])
    assert num_bytes(tmp_path) == cache.stats().num_bytes <= 2 * BLOCK_BYTES


def test_store_errors_propagate_unchanged_and_leave_nothing(tmp_path: Path, remote: Remote) -> None:
    name = biggest(remote)
    cache = BlockCache(tmp_path, 10 * BLOCK_BYTES)
    descriptors = len(list(Path("/proc/self/fd").iterdir())) if sys.platform == "linux" else 0
    for error in (StorageError("away"), KeyboardInterrupt(), MemoryError()):

        def fetch(_: Sequence[tuple[int, memoryview]], error: BaseException = error) -> None:
            raise error

        with pytest.raises(type(error)) as caught:
            cache.read_ranges(name, remote.objects[name], [(0, memoryview(bytearray(2 * BLOCK_BYTES)))], fetch)
        assert caught.value is error
        assert num_bytes(tmp_path) == cache.stats().num_bytes == 0
        assert not parts(tmp_path)
    remote.check(cache, name, [(0, remote.objects[name])])
    assert sys.platform != "linux" or len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_the_least_recently_used_block_is_evicted_first(tmp_path: Path, remote: Remote) -> None:
    name, cache = biggest(remote), BlockCache(tmp_path, 3 * BLOCK_BYTES)
    remote.check(cache, name, [(0, 1), (BLOCK_BYTES, 1)])
    first, second = blocks(tmp_path)
    os.utime(first, (1000, 1000))
    os.utime(second, (2000, 2000))
    remote.check(cache, name, [(1, 1)])
    assert first.stat().st_mtime > 1_000_000, "a hit counts as a use"
    remote.check(cache, next(n for n, size in remote.objects.items() if size == 2 * BLOCK_BYTES), [(0, BLOCK_BYTES)])
    remote.check(cache, name, [(2 * BLOCK_BYTES, 1)])
    assert not second.exists()
    assert first.exists()
    future = time.time() + 1e6
    os.utime(first, (future, future))
    remote.check(cache, next(n for n, size in remote.objects.items() if size == BLOCK_BYTES + 1), [(0, BLOCK_BYTES)])
    assert not first.exists(), "a timestamp in the future does not protect a block"
    assert cache.stats().evicted == 2


def test_each_job_evicts_down_to_its_own_bound(tmp_path: Path, remote: Remote) -> None:
    large, small = BlockCache(tmp_path, 6 * BLOCK_BYTES), BlockCache(tmp_path, 2 * BLOCK_BYTES)
    for name, size in remote.objects.items():
        remote.check(large, name, [(0, size)])
    assert num_bytes(tmp_path) > 5 * BLOCK_BYTES
    assert large.stats().evicted == 0 or num_bytes(tmp_path) <= 6 * BLOCK_BYTES
    remote.check(small, biggest(remote), [(0, 1)])
    assert num_bytes(tmp_path) <= 2 * BLOCK_BYTES


def test_only_its_own_files_are_ever_removed(tmp_path: Path, remote: Remote) -> None:
    """SAFE-1: foreign files, folders and links stay, and links are not followed."""
    outside, folder, name = tmp_path / "outside", tmp_path / "cache", biggest(remote)
    outside.mkdir()
    cache = BlockCache(folder, BLOCK_BYTES)
    remote.check(cache, name, [(0, 1)])
    mine = blocks(folder)[0]
    foreign = [folder / "notes.txt", folder / ROOT / "notes.txt", mine.parent / "notes", Path(f"{mine}.bak")]
    linked = "e0" if mine.parent.name != "e0" else "e1"
    linked_name = linked + "0" * 62
    foreign += [outside / f"{linked_name}-0", outside / f"{linked_name}-1.part", outside / f"{mine.name[:65]}7"]
    for path in foreign:
        path.write_bytes(b"mine")
    (folder / ROOT / linked).symlink_to(outside)
    link = mine.parent / f"{mine.name[:65]}7"
    link.symlink_to(outside / link.name)
    for number in range(3):
        remote.check(cache, name, [(number * BLOCK_BYTES, 1)])
    cache.discard(name, [(7 * BLOCK_BYTES, 1)])
    assert not link.is_symlink(), "the link has the name of a block"
    cache.discard(linked_name, [(0, 2 * BLOCK_BYTES)])
    data = memoryview(bytearray(5))
    cache.read_ranges(linked_name, 5, [(0, data)], lambda asked: asked[0][1].__setitem__(slice(0, 5), b"12345"))
    assert data == b"12345"
    BlockCache(folder, BLOCK_BYTES).discard(name, [(0, 3 * BLOCK_BYTES)])
    assert all(path.read_bytes() == b"mine" for path in foreign)
    assert len(list(outside.iterdir())) == 3
    assert (folder / ROOT / linked).is_symlink()
    assert not blocks(folder) or blocks(folder)[0].parent.name == linked


@pytest.mark.parametrize("kind", ["filled", "link", "file"])
def test_a_foreign_folder_is_refused(tmp_path: Path, remote: Remote, kind: str) -> None:
    """SAFE-1."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.tex").write_bytes(b"years")
    if kind == "filled":
        shutil.copytree(tmp_path / "theirs", tmp_path / ROOT)
    elif kind == "link":
        (tmp_path / ROOT).symlink_to(tmp_path / "theirs")
    else:
        (tmp_path / ROOT).write_bytes(b"years")
    before = sorted(tmp_path.rglob("*"))
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"cache_dir=.*Nothing in the subfolder was changed.*another cache_dir"):
            remote.check(BlockCache(tmp_path, BLOCK_BYTES), biggest(remote), [(0, 1)])
    assert sorted(tmp_path.rglob("*")) == before


def test_other_users_have_no_access(tmp_path: Path, remote: Remote) -> None:
    """SAFE-1: permissions are restricted regardless of the umask."""
    old = os.umask(0)
    try:
        remote.check(BlockCache(tmp_path / "a" / "b", 9 * BLOCK_BYTES), biggest(remote), [(0, 1)])
    finally:
        os.umask(old)
    root = tmp_path / "a" / "b" / ROOT
    for path in [root, *root.rglob("*")]:
        assert stat.S_IMODE(path.lstat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_invalid_arguments(tmp_path: Path, remote: Remote) -> None:
    with pytest.raises(ConfigError, match=r"cache_bytes=8388607: .*8388608"):
        BlockCache(tmp_path, BLOCK_BYTES - 1)
    cache = BlockCache(tmp_path / "new", BLOCK_BYTES)
    for name in ("../" + "0" * 61, "0" * 63, "A" * 64, ""):
        with pytest.raises(StorageError, match="64 hex digits"):
            cache.read_ranges(name, 10, [(0, memoryview(bytearray(1)))], lambda _: None)
        with pytest.raises(StorageError, match="64 hex digits"):
            cache.discard(name, [(0, 1)])
    for offset, size in ((-1, 1), (10, 1), (0, 11)):
        with pytest.raises(StorageError, match="the index refers to bytes"):
            cache.read_ranges("0" * 64, 10, [(offset, memoryview(bytearray(size)))], lambda _: None)
    assert not (tmp_path / "new").exists(), "nothing is created before it is needed"


def test_a_folder_that_cannot_be_created_is_not_an_error(
    tmp_path: Path, remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    cache = BlockCache(tmp_path / "file" / "cache", 9 * BLOCK_BYTES)
    for _ in range(3):
        remote.check(cache, biggest(remote), [(0, 1), (BLOCK_BYTES - 3, BLOCK_BYTES)])
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cannot be used (" in caplog.text
    assert cache.stats().bytes_fetched == 3 * (BLOCK_BYTES + 1), "only the requested bytes are fetched"


def test_a_folder_that_disappears_is_not_an_error(
    tmp_path: Path, remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    cache = BlockCache(tmp_path, 9 * BLOCK_BYTES)
    remote.check(cache, biggest(remote), [(0, 1)])
    shutil.rmtree(tmp_path / ROOT)
    for _ in range(3):
        remote.check(cache, biggest(remote), [(0, 1)])
    assert len(caplog.records) == 1
    cache.discard(biggest(remote), [(0, 1)])


def test_a_full_disk_is_not_an_error(tmp_path: Path, remote: Remote) -> None:
    """If blocks are truncated or cannot be written at all, reads still succeed and cached blocks stay usable."""
    name = biggest(remote)
    remote.check(BlockCache(tmp_path, 9 * BLOCK_BYTES), name, [(0, 1)])
    place = [name, [[5, BLOCK_BYTES], [2 * BLOCK_BYTES, 100]]]
    for limits in ([BLOCK_BYTES - 1, 1000], [100_000, 0]):
        order = {"do": "full_disk", "max_bytes": 9 * BLOCK_BYTES, "reads": 3, "places": place, "limits": limits}
        with user(tmp_path, remote, **order) as process:
            assert ends(process).count("cannot be used") == 1
    reopened(tmp_path, 9 * BLOCK_BYTES)
    assert not parts(tmp_path)
    assert blocks(tmp_path)[0].name.endswith("-0")


def test_readers_of_a_block_fetch_it_once(tmp_path: Path, remote: Remote) -> None:
    """Four processes with two threads each read all blocks at the same time; ranges come in any order."""
    name, log = biggest(remote), tmp_path / "log"
    place = [name, [[2 * BLOCK_BYTES, 9], [BLOCK_BYTES, 9], [5, 9]]]
    order = {"do": "read", "max_bytes": 9 * BLOCK_BYTES, "threads": 2, "reads": 2, "places": place}
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(user(tmp_path / "cache", remote, log=log, seconds=1.0, wait_seconds=200.0, **order))
            for _ in range(4)
        ]
        for process in processes:
            ends(process)
    fetched = sorted(line.split()[1] for line in log.read_text().splitlines())
    assert fetched == sorted(str(number * BLOCK_BYTES) for number in range(3))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_user_that_never_finishes_fetching_blocks_no_other_user(
    tmp_path: Path, remote: Remote, how: signal.Signals
) -> None:
    """A killed user's lock is released; others wait `wait_seconds` for a stopped user and then fetch themselves."""
    name = biggest(remote)
    order = {"do": "read", "max_bytes": 9 * BLOCK_BYTES, "reads": 1, "places": [name, [[0, 9], [BLOCK_BYTES, 9]]]}
    log = tmp_path / "log"
    with user(tmp_path / "cache", remote, log=log, seconds=1000, **order) as process:
        wait_until(log.exists)
        process.send_signal(how)
        cache = BlockCache(tmp_path / "cache", 9 * BLOCK_BYTES, wait_seconds=0.2 if how == signal.SIGSTOP else 200)
        remote.check(cache, name, [(BLOCK_BYTES, 9), (0, 9), (2 * BLOCK_BYTES, 9)])
        assert len(blocks(tmp_path / "cache")) == (1 if how == signal.SIGSTOP else 3)
        assert cache.stats().misses == 3
    remote.check(cache, name, [(BLOCK_BYTES, 9), (0, 9)])
    assert len(blocks(tmp_path / "cache")) == 3
    reopened(tmp_path / "cache", 9 * BLOCK_BYTES)


def test_a_child_holds_no_lock_of_its_dead_parent(tmp_path: Path, remote: Remote) -> None:
    name, log, folder = biggest(remote), tmp_path / "log", tmp_path / "cache"
    places = [name, [[0, 9], [BLOCK_BYTES, 9]]]
    order = {"do": "orphan", "max_bytes": 9 * BLOCK_BYTES, "log": log, "seconds": 1000, "places": places}
    with user(folder, remote, **order) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            process.kill()
            process.wait(60)
            remote.check(BlockCache(folder, 9 * BLOCK_BYTES), name, [(0, 9), (BLOCK_BYTES, 9)])
            assert len(blocks(folder)) == 2
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.slow
def test_a_ledger_lock_that_is_never_released_is_not_an_error(
    tmp_path: Path, remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    cache = BlockCache(tmp_path, 9 * BLOCK_BYTES)
    remote.check(cache, biggest(remote), [(0, 1)])
    with (tmp_path / ROOT / ".ledger").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for _ in range(3):
            remote.check(cache, biggest(remote), [(0, 1), (BLOCK_BYTES, 1)])
    assert len(caplog.records) == 1
    assert "another process still holds the lock" in caplog.text
    assert len(blocks(tmp_path)) == 1


@contextlib.contextmanager
def watched(folder: Path, max_bytes: int) -> Iterator[None]:
    """Check that the watcher never sees more bytes than the bound."""
    with user(folder, Remote(folder.parent), do="watch") as watcher:
        yield
        assert watcher.stdin is not None
        watcher.stdin.close()
        watcher.stdin = None
        out, err = watcher.communicate(timeout=200)
        assert 0 < int(out) <= max_bytes, err


def test_threads_and_processes_read_correctly_within_the_bound(tmp_path: Path, remote: Remote) -> None:
    """FETCH-2: with twelve readers and a cache half the size of the objects, the bound holds at every moment."""
    max_bytes = 4 * BLOCK_BYTES + 1000
    folder = tmp_path / "cache"
    with watched(folder, max_bytes), contextlib.ExitStack() as stack:
        order = {"do": "read", "max_bytes": max_bytes, "threads": 4, "reads": 16}
        for process in [stack.enter_context(user(folder, remote, seed=seed, **order)) for seed in range(3)]:
            ends(process)
    assert not parts(folder)
    assert BlockCache(folder, max_bytes).stats().num_bytes == num_bytes(folder)
    reopened(folder, max_bytes)


def check_a_kill(folder: Path, remote: Remote, seed: int) -> None:
    """Kill one of two users at a random moment; the other still reads correctly, and the cache stays consistent."""
    rng = random.Random(seed)
    max_bytes = rng.randint(2, 5) * BLOCK_BYTES
    order = {"do": "read", "max_bytes": max_bytes, "threads": 2}
    with (
        watched(folder, max_bytes),
        user(folder, remote, seed=f"{seed} killed", reads=10**6, **order) as killed,
        user(folder, remote, seed=f"{seed} other", reads=8, **order) as other,
    ):
        assert killed.stdout is not None
        assert killed.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0, 0.3))
        killed.kill()
        ends(other)
    assert BlockCache(folder, max_bytes).stats().num_bytes >= num_bytes(folder)
    remote.check_some(reopened(folder, max_bytes), rng)
    assert not parts(folder)


@pytest.mark.parametrize("seed", range(10))
def test_a_killed_user_does_not_affect_the_other(tmp_path: Path, remote: Remote, seed: int) -> None:
    """FETCH-2."""
    check_a_kill(tmp_path / "cache", remote, seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_killed_users_do_not_affect_the_others(tmp_path: Path, remote: Remote) -> None:
    """FETCH-2: the bounds differ from pair to pair."""
    for seed in range(1000, 1100):
        check_a_kill(tmp_path / f"cache-{seed % 3}", remote, seed)
        shutil.rmtree(tmp_path / f"cache-{(seed + 1) % 3}", ignore_errors=True)


def test_signals_may_interrupt_reads_anywhere(tmp_path: Path, remote: Remote) -> None:
    """STOP-1: no lock is left behind, and later reads are correct."""
    with user(tmp_path, remote, do="interrupt", max_bytes=3 * BLOCK_BYTES, reads=150) as process:
        ends(process)
    assert num_bytes(tmp_path) <= 3 * BLOCK_BYTES
    reopened(tmp_path, 3 * BLOCK_BYTES)
    assert not parts(tmp_path)


def test_forked_children_read_on_their_own(tmp_path: Path, remote: Remote) -> None:
    """Children are forked while other threads hold the locks."""
    with user(tmp_path, remote, do="children", max_bytes=3 * BLOCK_BYTES, reads=6, wait_seconds=200.0) as process:
        ends(process)
    reopened(tmp_path, 3 * BLOCK_BYTES)
    assert not parts(tmp_path)


def test_a_cache_smaller_than_a_window_does_not_multiply_the_bytes_fetched(tmp_path: Path) -> None:
    """Reads of small parts of many blocks that were evicted long ago mostly fetch only the requested bytes."""
    name, num_blocks, size = "ab" * 32, 64, 100_000
    cache, fetched = BlockCache(tmp_path, 8 * BLOCK_BYTES), []
    draw = random.Random(3)

    def fetch(wanted: Sequence[tuple[int, memoryview]]) -> None:
        fetched.append(sum(len(buffer) for _, buffer in wanted))

    num_wanted = 0
    for _ in range(2000):
        offset = draw.randrange(num_blocks) * BLOCK_BYTES + draw.randrange(BLOCK_BYTES - size)
        cache.read_ranges(name, num_blocks * BLOCK_BYTES, [(offset, memoryview(bytearray(size)))], fetch)
        num_wanted += size
    filling = 16 * BLOCK_BYTES
    assert sum(fetched) - filling < 3 * num_wanted
    assert cache.stats().hits > 0
