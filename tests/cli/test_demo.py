"""Tests of streamvid demo when it cannot continue: a one-line error, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import run_streamvid


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    done = run_streamvid("demo", "--dir", tmp_path / "taken", check=False)
    assert done.returncode == 2 and "is a file; choose a new" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_ctrl_c_while_the_corpus_is_built_leaves_no_process(tmp_path: Path) -> None:
    """STOP-1: Ctrl-C in a terminal reaches the whole process group, and all processes end."""
    command = [sys.executable, "-m", "streamvid", "demo", "--dir", str(tmp_path / "demo")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("[1/"):
            break
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=200)
    assert process.returncode == 130
    until = time.monotonic() + 30
    while any(child.is_running() and child.status() != "zombie" for child in family) and time.monotonic() < until:
        time.sleep(0.1)
    assert not [child for child in family if child.is_running() and child.status() != "zombie"]
    assert [path.name for path in (tmp_path / "demo").glob(".*")] == []
