"""Tests of streamvid copy in real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import run_streamvid
from tests.dataset.frozen import FROZEN
from tests.dataset.whole import flip, seal_whole
from tests.files import tree_of
from tests.servers import S3Env, S3Server

NATIVE = FROZEN / "native"


def test_copy_reports_its_work(tmp_path: Path) -> None:
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    dest = tmp_path / "dest"
    done = run_streamvid("copy", NATIVE, dest, env=env)
    num_bytes = sum(map(len, tree_of(NATIVE).values()))
    lines = [f"14 of 14 files copied, {num_bytes / 1000:.1f} kB", f"copied: {dest}", f"next: streamvid verify {dest}"]
    assert done.stdout.splitlines() == lines
    assert tree_of(dest) == tree_of(NATIVE) and "copy 13/13" in done.stderr
    report = json.loads(run_streamvid("copy", NATIVE, dest, "--json", env=env).stdout)
    assert (report["state"], report["num_copied"], report["num_kept"]) == ("already there", 0, 14)


def test_an_impossible_copy_is_a_one_line_error(tmp_path: Path) -> None:
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    shutil.copytree(NATIVE, tmp_path / "source")
    flip(tmp_path / "source" / "shards/96x64-5f/96x64-5f-000000.tar", 3000)
    done = run_streamvid("copy", tmp_path / "source", tmp_path / "dest", env=env, check=False)
    assert done.returncode == 1 and "96x64-5f-000000.tar is damaged" in done.stderr.splitlines()[-1]
    assert done.stderr.count("error: ") == 1 and not (tmp_path / "dest" / "manifest.json").exists()
    done = run_streamvid("copy", NATIVE, FROZEN / "text", env=env, check=False)
    assert done.returncode == 1 and "another sealed dataset" in done.stderr
    done = run_streamvid("copy", NATIVE, NATIVE, env=env, check=False)
    assert done.returncode == 2 and "are both" in done.stderr


@pytest.mark.parametrize("verb", ["copy", "verify"])
def test_an_interrupt_is_exit_code_130_and_the_same_command_resumes(tmp_path: Path, verb: str) -> None:
    """Ctrl-C ends the command without a traceback, and running it again resumes its work."""
    source, dest = tmp_path / "source", tmp_path / "dest"
    seal_whole(source, 150)
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    places = {"copy": [str(source), str(dest)], "verify": [str(source), "--deep"]}
    arguments = [sys.executable, "-m", "streamvid", verb, *places[verb], "--workers", "1"]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stderr is not None
        while not (line := process.stderr.readline()).startswith(("copy ", "shards ")):
            assert line
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=200)
    assert process.returncode == 130 and not output and "Traceback" not in errors
    assert errors.splitlines()[-1].startswith("interrupted; run the same command again")
    assert not (dest / "manifest.json").exists() and not (dest / ".copying").exists()
    report = json.loads(run_streamvid(*arguments[3:], "--json", env=env).stdout)
    if verb == "copy":
        assert report["num_kept"] >= 1 and tree_of(dest) == tree_of(source)
    else:
        assert report["is_right"] and report["num_shards_resumed"] >= 1


def test_from_one_server_to_another(tmp_path: Path, moto_server: S3Server, s3_env: S3Env) -> None:
    """--source-endpoint-url and --dest-endpoint-url override AWS_ENDPOINT_URL, at which no server listens here."""
    env = {**os.environ, **s3_env(moto_server), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    env["AWS_ENDPOINT_URL"] = "http://127.0.0.1:9"
    source, dest = moto_server.new_bucket(), moto_server.new_bucket()
    moto_server.upload_folder(NATIVE, source, "ds/")
    ends = [flag for side in ("source", "dest") for flag in (f"--{side}-endpoint-url", moto_server.endpoint_url)]
    done = run_streamvid("copy", f"s3://{source}/ds", f"s3://{dest}/copy/ds", *ends, env=env)
    assert "14 of 14 files copied" in done.stdout
    assert moto_server.tree(dest, "copy/ds") == tree_of(NATIVE)
