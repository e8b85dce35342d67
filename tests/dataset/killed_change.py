"""Dataset changes in processes that are killed: `python -m tests.dataset.killed_change ORDER`, with an Order as JSON.

Prints one line of JSON per fact, which test_living_kill.py checks.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet  # noqa: F401 - imported before the first fork, so that no child has to import it
import s3fs  # noqa: F401

import streamvid
from streamvid.storage import LocalStore, open_store
from tests.dataset.living import seen

WRITES = ("put", "create", "remove", "copy")


@dataclass(frozen=True)
class Order:
    """Parameters of a run.

    verb: change to make. base: local dataset. work: URL under which the dataset is copied for each kill.
    other: dataset to merge. count: number of kills.
    """

    verb: str
    base: str
    work: str
    other: str
    count: int


def change(verb: str, root: str | Path, other: str | Path) -> object:
    if verb == "remove":
        return streamvid.remove(root, keys=["c0", "c2", "c3"])
    if verb == "compact":
        return streamvid.compact(root, workers=1)
    if verb == "expire":
        return streamvid.compact(root, workers=1, expire=0)
    return streamvid.merge(root, other, on_duplicate="last", workers=1)


class Killer:
    """Killer of the current process at one moment. Each write has three moments: before, during and after it."""

    def __init__(self, moment: int | None, delay: float) -> None:
        self.number, self.is_due = 0, False
        self._moment, self._delay = moment, delay

    def watch(self, store: type) -> None:
        for name in WRITES:
            setattr(store, name, self._watched(getattr(store, name)))

    def _reach(self) -> bool:
        self.number += 1
        return self.number - 1 == self._moment

    def _watched(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if self._reach():
                die()
            if self._reach():
                self.is_due = True
                threading.Thread(target=lambda: (time.sleep(self._delay), die()), daemon=True).start()
            answer = write(*arguments)
            if self._reach():
                die()
            return answer

        return call


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(job: Callable[[], None]) -> int:
    """Run a job in a child process and return its wait status."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    try:
        job()
        sys.stdout.flush()
        os._exit(0)
    except BaseException as error:
        print(json.dumps({"error": repr(error)}), flush=True)
        os._exit(1)


def copied(base: str, root: str) -> None:
    source, dest = LocalStore(Path(base)), open_store(root)
    for file in source.files():
        dest.put(file.path, source.read(file.path))


def killed(order: Order, root: str, moment: int | None, delay: float) -> None:
    copied(order.base, root)
    killer = Killer(moment, delay)
    killer.watch(type(open_store(root)))
    change(order.verb, root, order.other)
    if killer.is_due:  # the last writes can finish before the kill
        time.sleep(60)
    print(json.dumps({"moments": killer.number}))


def completed(order: Order, root: str) -> None:
    """Report the state after a kill, run the change again, and report the final state."""
    report = streamvid.verify_dataset(root, deep=True, fresh=True)
    problems = list(map(str, report.problems))
    print(json.dumps({"keys": sorted(seen(root)), "is_right": report.is_right, "problems": problems}))
    change(order.verb, root, order.other)
    checked(root)


def checked(root: str) -> None:
    """Report the final state without temporary files: a kill during a lease renewal leaves one, which expires later."""
    report, store = streamvid.verify_dataset(root, deep=True, fresh=True), open_store(root)
    tree = [(file.path, hash(store.read(file.path))) for file in store.files() if not file.path.endswith(".tmp")]
    extra = [path for path in report.extra if not path.endswith(".tmp")]
    print(json.dumps({"end": hash(tuple(tree)), "is_right": report.is_right, "extra": extra}))


def main() -> None:
    order = Order(**json.loads(sys.argv[1]))
    rng = random.Random(order.verb)
    reading, writing = os.pipe()
    root = f"{order.work}/whole"

    def counted() -> None:
        os.dup2(writing, 1)
        killed(order, root, None, 0)
        checked(root)

    assert in_child(counted) == 0
    os.close(writing)
    with os.fdopen(reading) as lines:
        facts = [json.loads(line) for line in lines]
    for fact in facts:
        print(json.dumps(fact))
    num_moments = next(fact["moments"] for fact in facts if "moments" in fact)
    for moment in sorted(rng.sample(range(num_moments), min(order.count, num_moments))):
        root, delay = f"{order.work}/{moment}", rng.choice([0.0, 0.001, 0.004])
        status = in_child(lambda root=root, moment=moment, delay=delay: killed(order, root, moment, delay))
        print(json.dumps({"is_killed": os.WIFSIGNALED(status)}))
        assert in_child(lambda root=root: completed(order, root)) == 0


if __name__ == "__main__":
    main()
