"""Tests of the command in real processes: help, version, exit codes, and output to pipes and logs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import streamvid
from tests.cli.conftest import OPTIONS, Tiny
from tests.conftest import run_streamvid
from tests.processes import run_command

VERBS = ("annotate", "append", "bench", "compact", "copy", "demo", "encode", "extract", "ledger", "merge", "plan")
VERBS += ("preview", "remove", "report", "shard", "stats", "train", "verify", "versions")


def test_version() -> None:
    assert run_streamvid("--version").stdout.strip() == f"streamvid, version {streamvid.__version__}"


def test_help_names_every_verb_and_the_exit_codes() -> None:
    text = run_streamvid("--help").stdout
    assert all(f"\n  {verb} " in text for verb in VERBS)
    assert "130 interrupted" in text and "streamvid shard videos/ ds/ --dry-run" in text


@pytest.mark.parametrize("verb", [*(verb for verb in VERBS if verb != "ledger"), "ledger check", "ledger show"])
def test_help_of_a_verb_has_examples(verb: str) -> None:
    text = run_streamvid(*verb.split(), "-h").stdout
    assert "Examples:" in text and f"  streamvid {verb}" in text


@pytest.mark.parametrize(
    "arguments", [["shrad"], ["--fast"], ["stats"], ["stats", "a", "b"], ["shard", "a", "b", "--x"]]
)
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    done = run_streamvid(*arguments, check=False)
    assert done.returncode == 2 and not done.stdout
    assert "Error:" in done.stderr and "--help" in done.stderr and "Traceback" not in done.stderr


def test_a_mistyped_verb_gets_a_suggestion() -> None:
    assert "Did you mean 'shard'?" in run_streamvid("shrad", check=False).stderr


def test_an_error_is_one_line_and_verbose_adds_the_traceback(tmp_path: Path) -> None:
    quiet = run_streamvid("stats", tmp_path, check=False)
    assert quiet.returncode == 1 and quiet.stderr.count("\n") == 1 and quiet.stderr.startswith("error: no dataset at")
    verbose = run_streamvid("-v", "stats", tmp_path, check=False)
    assert verbose.returncode == 1 and "Traceback" in verbose.stderr and verbose.stderr.endswith(quiet.stderr)


def test_out_of_memory_is_a_one_line_error(tmp_path: Path) -> None:
    with (tmp_path / "metadata.json").open("wb") as file:
        file.truncate(2_000_000_000)  # a sparse file
    limited = ["bash", "-c", 'ulimit -v 1800000 && exec "$@"', "-", sys.executable, "-m", "streamvid"]
    done = run_command([*limited, "shard", tmp_path, tmp_path / "out"], check=False)
    assert done.returncode == 1 and done.stderr.startswith(
        "error: out of memory; use a machine with more memory, or raise"
    )
    assert done.stderr.count("\n") == 1


def test_verbose_logs_what_the_library_does(tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "broken.mp4").write_bytes(b"no video")
    arguments = ("shard", tmp_path / "videos", tmp_path / "ds", *OPTIONS)
    assert "INFO streamvid.sharder" in run_streamvid("-v", *arguments, check=False).stderr
    assert "INFO" not in run_streamvid(*arguments, check=False).stderr


def test_quiet_shows_results_and_errors_only(tiny: Tiny, tmp_path: Path) -> None:
    arguments = ("shard", tiny.videos, tmp_path / "ds", *OPTIONS)
    done = run_streamvid("-q", *arguments)
    assert not done.stderr and done.stdout.startswith("bucket ") and "3 input rows = 2 samples" in done.stdout
    assert run_streamvid("--quiet", *arguments, "--seed", "3", check=False).stderr.startswith("error: ")
    assert run_streamvid("-q", "-v", "stats", tmp_path, check=False).returncode == 2


@pytest.mark.parametrize(
    ("line", "offered"),
    [("streamvid st", "stats"), ("streamvid shard --min-f", "--min-fps"), ("streamvid shard --clips n", "native")],
)
def test_the_shell_completes_verbs_flags_and_choices(line: str, offered: str) -> None:
    """Completion works in the protocol of bash, which docs/content/reference/cli.md shows how to enable."""
    words = line.split(" ")
    asked = {"_STREAMVID_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    code = "import sys; sys.argv = ['streamvid']; from streamvid.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | asked, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [f"plain,{offered}"]


@pytest.mark.parametrize("verb", ["stats", "shard"])
def test_a_closed_pipe_shows_no_traceback(tiny: Tiny, verb: str) -> None:
    """`streamvid stats ds

    head` ends without a traceback if head exits before any output.
    """
    where = [tiny.dataset] if verb == "stats" else [tiny.videos, tiny.dataset, *OPTIONS]
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "streamvid", verb, *map(str, where)]
    try:
        done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False, timeout=200)
    finally:
        os.close(write_end)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr and "Errno" not in done.stderr


@pytest.mark.parametrize("option", [(), ("--json",)])
def test_names_that_the_output_cannot_encode_are_escaped(tmp_path: Path, option: tuple[str, ...]) -> None:
    """A file name in another alphabet is escaped in a log with an old encoding."""
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "東京.mp4").write_bytes(b"no video")
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    done = run_streamvid(
        "shard", tmp_path / "videos", tmp_path / "ds", "--dry-run", *option, env=environment, check=False
    )
    assert done.returncode == 1  # no file was accepted
    assert r"\u6771\u4eac.mp4" in done.stdout
