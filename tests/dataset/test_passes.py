"""Jobs of a pass over a dataset's files: their order, their first error, and interrupts at any moment."""

from __future__ import annotations

import contextlib
import itertools
import threading

import pytest

from streamvid.dataset.passes import in_parallel
from tests.processes import run_python

# Each interrupt comes as one result is asked for or handed over: where a lock taken for it would be held for ever.
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
def test_an_interrupt_at_any_moment_ends_it(seed: int) -> None:
    """Ctrl-C of a verify, copy or plan: it ends at once, and no thread is left or waited for."""
    done = run_python(INTERRUPTED, seed, "20000" if seed else "1000", check=False)
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr[-2000:]


def test_results_come_in_the_order_of_the_items_some_at_a_time() -> None:
    """However late each is done; of endless items only a few are taken ahead."""
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
def test_the_first_error_ends_it(where: str) -> None:
    """As it was raised, in the place of its result; what runs yet is told to stop, what is queued is not begun."""
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
    # Items that cannot be had end it while some of the results are on their way.
    assert found == list(range(10)) if where == "job" else found == list(range(len(found)))
    assert len(begun) < 20
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("streamvid-pass")]
