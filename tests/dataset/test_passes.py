"""Tests of parallel passes over a dataset's files: order of results, first error, and interrupts at any moment."""

from __future__ import annotations

import contextlib
import itertools
import threading

import pytest

from streamvid.dataset.passes import in_parallel
from tests.processes import run_python

# Each interrupt arrives while a result is requested or delivered, where a lock could be acquired and never released.
INTERRUPTED = """
import contextlib, itertools, random, signal, sys, threading
from streamvid.dataset.passes import in_parallel

faulty = random.Random(int(sys.argv[1]))
signal.signal(signal.SIGALRM, signal.default_int_handler)
for _ in range(int(sys.argv[2])):
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(
        in_parallel(lambda item, stop: item, itertools.count(), 2)
    ) as results:
        for wanted, found in enumerate(results):
            assert wanted == found
            if wanted == 5:
                signal.setitimer(signal.ITIMER_REAL, faulty.uniform(1e-5, 2e-3))
    assert threading.active_count() == 1, threading.enumerate()
print("done")
"""


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_interrupt_at_any_moment_ends_the_pass(seed: int) -> None:
    """Ctrl-C ends a verify, copy or plan at once, without leaving or waiting for a thread."""
    done = run_python(INTERRUPTED, seed, "20000" if seed else "1000", check=False)
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr[-2000:]


def test_results_come_in_the_order_of_the_items() -> None:
    """The order does not depend on when jobs finish, and only a few items are taken ahead."""
    together = threading.Barrier(3)

    def job(item: int, stop: threading.Event) -> int:
        if item < 3:
            together.wait(60)
        return -item

    items = iter(range(1000))
    with contextlib.closing(in_parallel(job, items, 3)) as results:
        assert list(itertools.islice(results, 100)) == [-item for item in range(100)]
        assert next(items) < 110
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("streamvid-pass")]


@pytest.mark.parametrize("where", ["job", "items"])
def test_the_first_error_ends_the_pass(where: str) -> None:
    """The error is raised unchanged in place of its result; running jobs are asked to stop, and queued jobs do not
    start."""
    begun = []

    def items():  # type: ignore[no-untyped-def]
        yield from range(10)
        if where == "items":
            raise KeyError("ten")
        yield from range(10, 1000)

    def job(item: int, stop: threading.Event) -> int:
        begun.append(item)
        if item == 10:
            raise KeyError("ten")
        assert item < 10 or stop.wait(60)
        return item

    found = []
    with pytest.raises(KeyError, match="ten"):
        for result in in_parallel(job, items(), 4):
            found.append(result)
    # An error of the iterator ends the pass while some results are still pending.
    assert found == list(range(10)) if where == "job" else found == list(range(len(found)))
    assert len(begun) < 20
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("streamvid-pass")]
