"""Tests of the worker pool: workers start and work wherever the caller runs, or an error names what is missing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import run_command

READ = """
import streamvid, sys
with streamvid.VideoLoader(sys.argv[1], batch_size=1, num_workers=2) as loader:
    count = 0
    for batch in loader:
        count += len(batch.sample_keys)
with open(sys.argv[2], "w") as file:
    file.write(str(count))
"""


def run(dataset: Path, out: Path, code: str, shell: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` as a main program, started by a shell that first runs `shell`."""
    out.unlink(missing_ok=True)
    return run_command(
        ["bash", "-c", f'{shell}\nexec "$@"', "-", sys.executable, "-c", code, str(dataset), str(out)],
        check=False,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize(
    "code",
    [
        "import threading\nthread = threading.Thread(target=exec, args=(READ, {}))\nthread.start()\nthread.join()",
        "import asyncio\nasync def main():\n    exec(READ, {})\nasyncio.run(main())",
        "import asyncio\nasync def main():\n    await asyncio.to_thread(exec, READ, {})\nasyncio.run(main())",
        "import code\nconsole = code.InteractiveConsole()\nconsole.runcode(READ)",
        "import warnings, torch\nwarnings.simplefilter('error')\nexec(READ, {})",
        "import signal\nsignal.signal(signal.SIGPIPE, signal.SIG_DFL)\nexec(READ, {})",
        "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nexec(READ, {})",
        "import sys, pathlib, torch\nsys.path += ['', pathlib.Path('x'), 'nowhere']\nexec(READ, {})",
        "import os, sys, tempfile, torch\nfolder = tempfile.mkdtemp()\nos.chdir(folder)\nos.rmdir(folder)\n"
        "sys.path.insert(0, '')\nexec(READ, {})",
    ],
)
def test_programs_of_all_kinds(dataset: Path, tmp_path: Path, code: str) -> None:
    out = tmp_path / "count"
    result = run(dataset, out, f"READ = {READ!r}\n{code}")
    assert result.returncode == 0 and out.read_text() == "23", result.stderr
    assert not result.stderr


@pytest.mark.parametrize(
    ("shell", "environment"),
    [
        ("exec <&-", {}),
        ("exec >&-", {}),
        ("exec <&- >&- 2>&-", {}),
        ("ulimit -n 64", {}),
        ("", {"PYTHONWARNINGS": "error", "PYTHONINSPECT": "1"}),
        ("", {"PYTHONDEVMODE": "1", "PYTHONWARNINGS": ""}),
        ("", {"PYTHONPATH": "relative:", "PYTHONNOUSERSITE": "1"}),
    ],
)
def test_environments_of_all_kinds(dataset: Path, tmp_path: Path, shell: str, environment: dict[str, str]) -> None:
    out = tmp_path / "count"
    result = run(dataset, out, READ, shell, **environment)
    assert result.returncode == 0 and out.read_text() == "23", result.stderr


def test_files_of_the_caller_that_shadow_modules(dataset: Path, tmp_path: Path) -> None:
    """Workers import the right modules even if the caller imported them from another folder or at an earlier time."""
    for name in ("json", "random", "socket", "struct", "numpy", "av", "select"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    out = tmp_path / "count"
    result = run(dataset, out, READ, f"cd {tmp_path}", PYTHONSAFEPATH="1")
    assert result.returncode == 0 and out.read_text() == "23", result.stderr


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import sys, torch\nsys.executable = None\n", "num_workers=0"),
        ("import sys\nsys.executable = ''\n", "num_workers=0"),
        (
            "import sys\nsys.executable = '/nowhere/python'\n",
            "cannot start 2 decode workers.*lower num_workers, or set it to 0",
        ),
        ("import sys\nsys.executable = '/bin/false'\n", "ended with exit code 1"),
        ("import resource, torch\nresource.setrlimit(resource.RLIMIT_FSIZE, (9, 9))\n", "bytes of memory.*too large"),
        ("import resource, streamvid, torch, av\nresource.setrlimit(resource.RLIMIT_NOFILE, (12, 12))\n", "files"),
        (
            "import resource, streamvid, torch, av\nl = 2**20 * (int(open('/proc/self/statm').read().split()[0]) // 256 + 200)\n"
            "resource.setrlimit(resource.RLIMIT_AS, (l, l))\n",
            "memory",
        ),
    ],
)
def test_errors_name_what_is_missing(dataset: Path, tmp_path: Path, code: str, says: str) -> None:
    out = tmp_path / "count"
    result = run(dataset, out, code + READ)
    error = result.stderr.strip().splitlines()[-1]
    assert result.returncode == 1 and "streamvid.errors." in error, result.stderr
    assert re.search(says, error), error


def test_an_exit_with_open_loaders(dataset: Path, tmp_path: Path) -> None:
    """STOP-1: a global holds an open loader, batches and an iterator are held, and another thread runs a loader."""
    code = """
import sys, threading, streamvid
loader = streamvid.VideoLoader(sys.argv[1], batch_size=1, num_workers=2, num_epochs=None)
iterator = iter(loader)
batches = [next(iterator) for _ in range(3)]
me = sys.modules[__name__]
other = streamvid.VideoLoader(sys.argv[1], batch_size=1, num_workers=0, num_epochs=None)
def forever():
    try:
        for batch in other:
            pass
    except streamvid.StreamvidError:
        pass
threading.Thread(target=forever, daemon=True).start()
next(iterator)
"""
    for _ in range(3):
        result = run(dataset, tmp_path / "count", code)
        assert result.returncode == 0 and not result.stderr, result.stderr
