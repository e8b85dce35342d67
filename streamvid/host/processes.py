"""Start and shutdown of worker processes that never outlive their parent.

A worker is a new interpreter, never a fork, so it inherits no threads, locks, CUDA state or unguarded `__main__`. It
watches its parent and its socket (host/worker.py), so it ends whenever the parent ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from streamvid.errors import ConfigError

_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from streamvid.host.worker import main; main(*sys.argv[1:])"
)
# The workers provide the parallelism; library threads inside them would only compete.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
# All that a worker without stores needs. Any other variable may be a credential.
_PASSED = {
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP", "XDG_CACHE_HOME"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "CONDA_PREFIX", "GLIBC_TUNABLES"),
}
_PASSED_PREFIXES = ("LC_", "PYTHON", "STREAMVID_", "MALLOC_", "OMP_", "COVERAGE_", "ASAN_", "UBSAN_", "SVT_")


def start_worker(
    entry: str,
    descriptors: Sequence[int],
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    *,
    opens_stores: bool,
) -> subprocess.Popen[bytes]:
    """Start a worker process that calls the function `entry`, given as "module:function".

    The function receives the numbers in `descriptors`, followed by `arguments`, all as text. The first descriptor is a
    socket; closing the other end of the socket ends the worker.

    environment: defaults for environment variables that this process does not set.
    opens_stores: True if the worker opens object stores. Only then does it receive environment variables that may
        contain credentials, because a hostile file that takes over a decoder must not find any (SAFE-1).

    Raises OSError if the process cannot be started, and ConfigError if no Python interpreter is available.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        raise ConfigError(
            f"sys.executable={sys.executable!r} is not a Python interpreter, but worker processes need one; run the "
            "program with a Python interpreter (a VideoLoader can also run without workers: num_workers=0)"
        )
    with contextlib.ExitStack() as opened:
        mine = list(descriptors)
        if hasattr(os, "pidfd_open"):
            mine.append(os.pidfd_open(os.getpid()))
            opened.callback(os.close, mine[-1])
        inherited = []
        for descriptor in mine:
            # Without standard streams, other files have the numbers 0 to 2, which a worker could not inherit.
            inherited.append(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3))
            opened.callback(os.close, inherited[-1])
        parent = inherited[-1] if len(mine) > len(descriptors) else -1
        numbers = map(str, [parent, *inherited[: len(descriptors)]])
        return subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(_search_path()), entry, *numbers, *arguments],
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            env={**(environment or {}), **_inherited(opens_stores), **_ENVIRONMENT},
            process_group=0,  # the caller handles Ctrl-C in the terminal
        )


def _inherited(opens_stores: bool) -> dict[str, str]:
    """Return a copy of this process's environment for a worker, without credentials unless the worker opens stores."""
    if opens_stores:
        return dict(os.environ)
    names = (name for name in os.environ if name in _PASSED or name.startswith(_PASSED_PREFIXES))
    return {name: os.environ[name] for name in names}


def end_workers(workers: Sequence[subprocess.Popen[bytes]], grace_seconds: float = 0.0) -> None:
    """Wait for workers to end by themselves. Kill workers still running after `grace_seconds`. Reap all workers."""
    deadline = time.monotonic() + grace_seconds
    for worker in workers:
        try:
            worker.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
    for worker in workers:
        worker.wait()


def describe_exit(code: int) -> str:
    """Describe a `Popen` return code in words, such as "was killed by SIGKILL"."""
    if code >= 0:
        return f"ended with exit code {code}"
    known = {number.value: number.name for number in signal.Signals}
    return f"was killed by {known.get(-code, f'signal {-code}')}"


def _search_path() -> list[str]:
    try:
        here = [str(Path.cwd())]
    except OSError:  # a deleted folder has no modules
        here = []
    return [place for entry in sys.path if isinstance(entry, str) for place in ([entry] if entry else here)]
