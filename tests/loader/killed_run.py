"""Launcher of the rank processes in test_kill.py: imports torch once, then forks one process per requested rank.

    python -m tests.loader.killed_run

Reads one JSON command per line, ["start", order] or ["wait", pid, seconds], and answers with a process id or an exit
status (null while the process runs, negative for a signal). Each forked process creates its own loader. The launcher
has no loader and no threads.

Each rank logs every received batch in a single write: [number, epoch, bucket, [[key, is_repeat, checksum of the
frames], ...]]. The last line is ["end", steps, epoch], or ["WorkerError", ...] if a worker died. After randomly chosen
steps, the rank saves the loader's state to a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import time
import zlib
from pathlib import Path
from typing import Any

WORKER_DIED = 17


def stream(order: dict[str, Any], log: int) -> None:
    """Run two epochs, or their remainder after the saved state, and log each batch."""
    from streamvid.loader.loader import VideoLoader
    from streamvid.plan.position import World

    rng = random.Random(f"{order['seed']} {order['life']} {order['rank']}")
    with VideoLoader(
        order["dataset"],
        batch_size=order["batch_size"],
        world=World(order["rank"], order["num_ranks"]),
        tail=order["tail"],
        num_workers=order["num_workers"],
        num_epochs=2,
        seed=order["seed"],
        limits={"prefetch_bytes": 1 << 20},
        output={"ledger": order["ledger"]},
    ) as loader:
        if order["state"] is not None:
            loader.load_state_dict(json.loads(Path(order["state"]).read_text()))
        number = 0
        for number, batch in enumerate(loader, 1):
            frames = batch.video.permute(0, 2, 3, 4, 1).numpy()
            samples = zip(batch.sample_keys, batch.is_repeat.tolist(), map(zlib.crc32, frames), strict=True)
            write(log, [number, loader.epoch, batch.bucket.id, list(samples)])
            if rng.random() < 0.4:
                save(loader.state_dict(), Path(order["folder"]) / f"state-{order['life']}-{number}-{order['rank']}")
            time.sleep(rng.uniform(0, 0.01))
        write(log, ["end", number, loader.epoch])


def write(log: int, line: list[Any]) -> None:
    os.write(log, json.dumps(line).encode() + b"\n")


def save(state: dict[str, Any], path: Path) -> None:
    temporary = path.with_suffix(".temporary")
    temporary.write_text(json.dumps(state))
    temporary.rename(path)


def rank(order: dict[str, Any]) -> int:
    """Run one rank and return its exit status."""
    from streamvid.errors import WorkerError

    folder, name = Path(order["folder"]), f"{order['life']}-{order['rank']}"
    for number, path in enumerate((os.devnull, os.devnull, folder / f"errors-{name}")):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    log = os.open(folder / f"log-{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
    try:
        stream(order, log)
    except WorkerError as error:
        write(log, ["WorkerError", str(error)])
        return WORKER_DIED
    return 0


def start(order: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        status = rank(order)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def wait(pid: int, seconds: float) -> int | None:
    until = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            return None
        time.sleep(0.002)


def main() -> None:
    import numpy  # noqa: F401
    import torch

    import streamvid.loader.loader  # noqa: F401

    torch.set_num_threads(1)
    with contextlib.suppress(KeyboardInterrupt):
        for line in sys.stdin:
            what, *values = json.loads(line)
            print(json.dumps(start(*values) if what == "start" else wait(*values)), flush=True)


if __name__ == "__main__":
    main()
