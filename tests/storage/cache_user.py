"""Cache users for test_cache.py that run in separate processes.

    python -m tests.storage.cache_user '{"do": "read", "folder": ..., "remote": ..., "max_bytes": ..., ...}'

The remote is a folder of files named by their SHA-256. A fetch reads from these files and logs the requested blocks,
one per line. All bytes that a read returns are compared with the remote's; exit status 0 means that they were all
correct.
"""

from __future__ import annotations

import fcntl
import json
import logging
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from streamvid.storage.cache.blocks import BLOCK_BYTES, BlockCache


class Remote:
    """Slow store over a folder of files; `log` receives "<name> <offset> <bytes>" per fetched block."""

    def __init__(self, folder: Path, log: Path | None = None, seconds: float = 0.0) -> None:
        self.folder, self.log, self.seconds = folder, log, seconds
        self.objects = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}

    def read(self, name: str, offset: int, size: int) -> bytes:
        with (self.folder / name).open("rb") as file:
            return os.pread(file.fileno(), size, offset)

    def fetch(self, name: str, parts: Sequence[tuple[int, memoryview]]) -> None:
        if self.log is not None:
            lines = "".join(f"{name} {offset} {len(buffer)}\n" for offset, buffer in parts)
            descriptor = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(descriptor, lines.encode())
            os.close(descriptor)
        time.sleep(self.seconds)
        for offset, buffer in parts:
            buffer[:] = self.read(name, offset, len(buffer))

    def check(self, cache: BlockCache, name: str, places: Sequence[tuple[int, int]]) -> None:
        """Read (offset, size) pairs through the cache into new buffers and compare the bytes with the remote's."""
        buffers = [(offset, memoryview(bytearray(size))) for offset, size in places]
        cache.read_ranges(name, self.objects[name], buffers, lambda parts: self.fetch(name, parts))
        for offset, buffer in buffers:
            assert buffer == self.read(name, offset, len(buffer)), f"wrong bytes of {name} at {offset}"

    def check_some(self, cache: BlockCache, rng: random.Random) -> None:
        name = rng.choice(list(self.objects))
        places = []
        for _ in range(rng.randint(1, 3)):
            size = rng.choice([1, 4096, 100_000, BLOCK_BYTES, 2 * BLOCK_BYTES])
            size = min(size, self.objects[name])
            places.append((rng.randint(0, self.objects[name] - size), size))
        self.check(cache, name, places)


def read(order: dict[str, Any], cache: BlockCache, remote: Remote) -> None:
    """Run random or given reads in several threads that start together."""
    failures: list[BaseException] = []

    def run(number: int) -> None:
        rng = random.Random(f"{order['seed']} {number}")
        try:
            for _ in range(order["reads"]):
                if "places" in order:
                    remote.check(cache, *order["places"])
                else:
                    remote.check_some(cache, rng)
        except BaseException as error:
            failures.append(error)

    print("ready", flush=True)
    threads = [threading.Thread(target=run, args=(number,)) for number in range(order["threads"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def interrupt(order: dict[str, Any], cache: BlockCache, remote: Remote) -> None:
    """Interrupt reads with signals at random moments; check that no lock is left and that later reads are correct."""
    rng = random.Random(order["seed"])
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    broken = 0
    for _ in range(order["reads"]):
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.00005, 0.02))
            remote.check_some(cache, rng)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:  # only the timer raises it
            broken += 1
    assert broken > order["reads"] // 10
    for path in Path(order["folder"]).rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for _ in range(10):
        remote.check_some(cache, rng)


def check_in_child(cache: BlockCache, remote: Remote, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(5):
        remote.check_some(cache, rng)
    assert cache.stats().hits + cache.stats().misses > 0


def children(order: dict[str, Any], cache: BlockCache, remote: Remote) -> None:
    """Fork children, which inherit the cache object, while other threads read."""
    stop = threading.Event()

    def keep_reading(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            remote.check_some(cache, rng)

    threads = [threading.Thread(target=keep_reading, args=(seed,), daemon=True) for seed in range(2)]
    for thread in threads:
        thread.start()
    try:
        for seed in range(order["reads"]):
            child = multiprocessing.get_context("fork").Process(target=check_in_child, args=(cache, remote, seed))
            child.start()
            child.join(60)
            assert child.exitcode == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def orphan(order: dict[str, Any], cache: BlockCache, remote: Remote) -> None:
    """Fork a child while a thread fetches; the child does nothing and outlives its parent."""
    threading.Thread(target=remote.check, args=(cache, *order["places"]), daemon=True).start()
    while not (remote.log and remote.log.exists()):
        time.sleep(0.001)
    child = os.fork()
    if child == 0:
        time.sleep(1000)
    print(child, flush=True)
    time.sleep(1000)


def full_disk(order: dict[str, Any], cache: BlockCache, remote: Remote) -> None:
    """Limit the file size so that blocks are first truncated and then cannot be written at all."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for limit in order["limits"]:
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
        for _ in range(order["reads"]):
            remote.check(cache, *order["places"])


def watch(order: dict[str, Any]) -> None:
    """Sum the file sizes until stdin ends, then print the largest total observed."""
    most = 0
    threading.Thread(target=lambda: (sys.stdin.read(), os.write(1, f"{most}\n".encode()), os._exit(0))).start()
    while True:
        # Files come and go during the listing: an inconsistent sum is unlikely to occur twice in a row.
        most = max(most, min(num_bytes(Path(order["folder"])) for _ in range(2)))
        time.sleep(0.0005)


def num_bytes(folder: Path) -> int:
    """Return the size of all blocks, complete or partial; each counts once even if it is renamed during the listing."""
    sizes = {}
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(f"{root}/{name}")
            except FileNotFoundError:
                continue
            if not name.startswith("."):
                sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    order = json.loads(sys.argv[1])
    if order["do"] == "watch":
        watch(order)
    cache = BlockCache(Path(order["folder"]), order["max_bytes"], wait_seconds=order.get("wait_seconds", 10.0))
    log = Path(order["log"]) if "log" in order else None
    remote = Remote(Path(order["remote"]), log, order.get("seconds", 0.0))
    actions = {"read": read, "interrupt": interrupt, "children": children, "orphan": orphan, "full_disk": full_disk}
    actions[order["do"]](order, cache, remote)
    print("end", flush=True)


if __name__ == "__main__":
    main()
