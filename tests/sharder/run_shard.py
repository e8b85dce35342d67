"""One run of the sharder in a process of its own, which can be killed at a given moment.

The argument is one JSON object with these fields:
source, dest, options; kill: [phase, done, delay in seconds] or null; kill_worker: [phase, done] or null; verb: "append"
to add the source to the dataset with `options` as nested fields.
Prints one line per progress event.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

import psutil

from streamvid.buckets.bucket import parse_buckets
from streamvid.sharder.append import append
from streamvid.sharder.sharder import shard
from tests.shard_options import shard_options


def main() -> None:
    order = json.loads(sys.argv[1])
    kill, kill_worker = order.get("kill"), order.get("kill_worker")

    def progress(phase: str, done: int, total: int) -> None:
        nonlocal kill, kill_worker
        print(phase, done, total, flush=True)
        if kill and phase == kill[0] and done >= kill[1]:
            delay, kill = kill[2], None
            if delay == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Thread(target=kill_later, args=(delay,), daemon=True).start()
        if kill_worker and phase == kill_worker[0] and done >= kill_worker[1]:
            kill_worker = None
            for child in psutil.Process().children():
                child.kill()

    if order.get("verb") == "append":
        print(append(order["dest"], order["source"], order["options"], progress=progress).state)
        return
    options = {**order["options"], "buckets": parse_buckets(order["options"]["buckets"])}
    print(shard(order["source"], order["dest"], shard_options(**options), progress).state)


def kill_later(delay_seconds: float) -> None:
    threading.Event().wait(delay_seconds)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
