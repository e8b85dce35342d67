"""Tests of streamvid shard in real processes: its output, exit codes, and how it resumes."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import streamvid
from streamvid.buckets.bucket import parse_buckets
from streamvid.dataset.versions.open import open_dataset
from streamvid.errors import DatasetError
from streamvid.sharder.sharder import status
from tests.cli.conftest import OPTIONS, Call, Tiny
from tests.clips import ROOT, encode, frames_of
from tests.conftest import run_streamvid
from tests.files import tree_of
from tests.shard_options import shard_options

# Control characters other than line breaks: bars, colors, cursor movements.
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")


def test_the_report_has_tables_and_counts(tiny: Tiny, tmp_path: Path) -> None:
    """SHARD-3: the counts add up, and the rejection is shown with its reason."""
    done = run_streamvid("shard", tiny.videos, tmp_path / "ds", *OPTIONS)
    assert re.search(r"^96x64-5f +5 x 64 x 96 +1 +1 ", done.stdout, re.MULTILINE)
    assert re.search(r"^64x96-5f +5 x 96 x 64 +1 +1 ", done.stdout, re.MULTILINE)
    assert re.search(r"^rejected: row 0  broken\.mp4: .*not a video", done.stdout, re.MULTILINE)
    assert "3 input rows = 2 samples in 2 shards" in done.stdout and "+ 1 rejected" in done.stdout
    assert f"next: streamvid stats {tmp_path / 'ds'}" in done.stdout
    assert tree_of(tmp_path / "ds") == tree_of(tiny.dataset)


@pytest.mark.parametrize(
    "fault",
    [
        "raise ImportError('libavcodec.so.61: cannot open shared object file')",
        "def open(*args, **options): raise TypeError('open() got an unexpected keyword argument')",
    ],
)
def test_a_broken_installation_rejects_no_file(tiny: Tiny, tmp_path: Path, fault: str) -> None:
    """A broken library is an error; otherwise, every video would be rejected, and the journal would keep the
    rejections."""
    (tmp_path / "broken" / "av").mkdir(parents=True)
    (tmp_path / "broken" / "av" / "__init__.py").write_text(f"__version__ = '0'\n{fault}\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path / 'broken'}:{ROOT}"}
    done = run_streamvid("shard", tiny.videos, tmp_path / "ds", *OPTIONS, check=False, env=env)
    assert done.returncode == 1 and "not the file" in done.stderr, done.stderr
    assert "rejected" not in done.stdout and not (tmp_path / "ds" / "manifest.json").exists()
    run_streamvid("shard", tiny.videos, tmp_path / "ds", *OPTIONS)
    assert tree_of(tmp_path / "ds") == tree_of(tiny.dataset)


def test_status_of_a_running_a_stopped_and_a_sealed_build(tiny: Tiny, tmp_path: Path) -> None:
    """Another process can read the status; the build writes the same bytes as without that and leaves no extra file."""
    dest = tmp_path / "ds"
    options = {"buckets": parse_buckets(OPTIONS[1]), "workers": 1}
    with pytest.raises(DatasetError, match="neither a dataset nor an unfinished build at"):
        status(dest, shard_options(**options))
    order = {"source": str(tiny.videos), "dest": str(dest), "kill": ["build", 1, 0]}
    command = [sys.executable, "-m", "tests.sharder.run_shard"]
    order["options"] = {**options, "buckets": OPTIONS[1]}
    with subprocess.Popen([*command, json.dumps(order)], cwd=ROOT, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None and run.stdout.readline().startswith(b"records")
        run.stdout.readline()
        run.send_signal(signal.SIGSTOP)
        running = status(dest, shard_options(**options))
        run.send_signal(signal.SIGCONT)
        run.stdout.read()
    assert (running.state, running.pid, run.returncode) == ("running", run.pid, -signal.SIGKILL)
    stopped = json.loads(run_streamvid("shard", "--status", dest, "--json").stdout)
    assert stopped["state"] == "stopped" and stopped["rejections"] == {"not-media": 1}
    phases = [(phase["name"], phase["done"], phase["total"]) for phase in stopped["phases"]]
    # Progress is written once per second, so a shard that was finished just before the kill may be missing.
    assert phases in ([("probe", 3, 3), ("build", done, 2)] for done in (0, 1))
    text = run_streamvid("shard", "--status", dest).stdout
    assert re.search(r"^build +[01] +2\b", text, re.MULTILINE) and "run the same command again" in text
    assert "rejected so far as not-media: 1" in text
    run_streamvid("shard", tiny.videos, dest, *OPTIONS)
    assert status(dest, shard_options(**options)).state == "sealed" and tree_of(dest) == tree_of(tiny.dataset)


def test_progress_goes_to_the_error_stream_without_control_characters(tiny: Tiny, tmp_path: Path) -> None:
    done = run_streamvid("shard", tiny.videos, tmp_path / "ds", *OPTIONS)
    assert "probe 3/3\n" in done.stderr and "build 2/2\n" in done.stderr and "seal" in done.stderr
    assert not CONTROL.search(done.stdout) and not CONTROL.search(done.stderr)
    assert "probe" not in done.stdout


def test_the_output_is_only_json(tiny: Tiny, tmp_path: Path) -> None:
    done = run_streamvid("shard", tiny.videos, tmp_path / "ds", *OPTIONS, "--json")
    assert json.loads(done.stdout) == tiny.report
    assert tiny.report["state"] == "built"
    assert (tiny.report["num_records"], tiny.report["num_samples"], tiny.report["num_rejected"]) == (3, 2, 1)


def test_native_clips_are_reported_with_bytes_and_quality(tiny: Tiny, tmp_path: Path) -> None:
    """SHARD-3: encoding appears in the tables, in JSON and in `stats`; a dry run encodes nothing and says so."""
    native = ("--clips", "native", "--crf", "23", "--gop", "8", "--fps", "30000/1001", "--max-clip-seconds", "0.3")
    planned = run_streamvid("shard", tiny.videos, tmp_path / "ds", *OPTIONS, *native, "--dry-run")
    assert "3 input rows, split into 5 windows = 4 samples + 1 rejected" in planned.stdout
    assert "to be encoded: " in planned.stdout and "encode" not in planned.stderr and list(tmp_path.iterdir()) == []
    done = run_streamvid("shard", tiny.videos, tmp_path / "ds", *OPTIONS, *native)
    assert "encode 4/4\n" in done.stderr
    assert re.search(r"^96x64-5f +5 x 64 x 96 +2 +1 .* dB +[0-9.]+ dB$", done.stdout, re.MULTILINE)
    assert re.search(r"^encoded: .* of sources to .* of clips in [0-9.]+ s of CPU time$", done.stdout, re.MULTILINE)
    value = json.loads(run_streamvid("shard", tiny.videos, tmp_path / "ds", *OPTIONS, *native, "--json").stdout)
    assert (value["num_records"], value["num_windows"], value["num_samples"], value["num_rejected"]) == (3, 5, 4, 1)
    stats = run_streamvid("stats", tmp_path / "ds").stdout
    assert "clips: native" in stats and "encoded: h264 crf 23, gop 8, fps 30000/1001, audio aac; PSNR-Y " in stats
    assert "rejected: 1 of 5 windows of 3 input rows" in stats
    facts = json.loads(run_streamvid("stats", tmp_path / "ds", "--json").stdout)
    assert facts["native"]["encoding"]["fps"] == "30000/1001" and facts["native"]["quality"]["psnr_y"]["min"] > 30


def test_copied_clips_have_a_frame_rate_rule(tiny: Tiny, tmp_path: Path) -> None:
    """OPEN-SORA 11: the manifest stores the frame rate rule for loaders; without a rule, every frame is used."""
    assert open_dataset(tiny.dataset).manifest.frame_rate.fps is None
    run_streamvid("shard", tiny.videos, tmp_path / "ds", *OPTIONS, "--fps", "30000/1001", "--fps-rule", "cap")
    assert open_dataset(tmp_path / "ds").manifest.frame_rate.to_json() == {"rule": "cap", "fps": "30000/1001"}
    refused = run_streamvid("shard", tiny.videos, tmp_path / "no", *OPTIONS, "--fps-rule", "cap", check=False)
    assert refused.returncode == 2
    assert "--fps-rule 'cap' requires a frame rate; also set clips.fps" in refused.stderr


def test_the_summary_of_the_source_comes_before_the_tables(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "captions.csv").write_text("video,caption\nwide.mp4,x\n")
    for name in ("wide.mp4", "wide.txt", "tall.mp4"):
        (tmp_path / name).write_bytes((tiny.videos / name).read_bytes())
    (tmp_path / "again.mp4").write_bytes((tiny.videos / "wide.mp4").read_bytes())
    done = run_streamvid("shard", tmp_path, tmp_path / "ds", *OPTIONS, "--fps", "30", "--dry-run").stdout
    assert done.index("frames per second") < done.index("T x H x W")
    for line in (
        f"input: {tmp_path}: 3 rows in layout 'folder'",
        "  captions: 1 of 3 usable rows; without a caption: 2",
        "  note: metadata files that were not read: 1 (captions.csv); read one with --metadata FILE",
        "  frames per second: 24, read at 30",
        "  note: files with the same content as another file: 1 (wide.mp4 = again.mp4)",
    ):
        assert f"{line}\n" in done
    assert "videos below 30 frames per second, some of whose frames are repeated: 3 (again.mp4 (24 fps), " in done
    assert "; reject them with --min-fps 30\n" in done


@pytest.mark.parametrize("output", [(), ("--json",)])
def test_a_dry_run_reports_the_same_and_writes_nothing(tiny: Tiny, tmp_path: Path, output: tuple[str, ...]) -> None:
    done = run_streamvid("shard", tiny.videos, tmp_path / "ds", *OPTIONS, "--dry-run", *output)
    assert list(tmp_path.iterdir()) == []
    if output:
        assert json.loads(done.stdout) == tiny.report | {"state": "dry run"}
    else:
        assert "dry run: nothing was written" in done.stdout and "3 input rows = 2 samples" in done.stdout


def test_a_dry_run_that_accepts_nothing_fails(tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "a.mp4").write_bytes(b"not a video")
    done = run_streamvid("shard", tmp_path / "videos", tmp_path / "ds", *OPTIONS, "--dry-run", check=False)
    assert done.returncode == 1 and "1 rejected" in done.stdout and done.stderr.count("Traceback") == 0


def test_a_dry_run_does_not_change_an_existing_dataset(tiny: Tiny) -> None:
    before = tree_of(tiny.dataset)
    run_streamvid("shard", tiny.videos, tiny.dataset, *OPTIONS, "--seed", "7", "--dry-run")
    assert tree_of(tiny.dataset) == before


def test_an_already_sealed_dataset_is_reported_with_exit_code_0(tiny: Tiny) -> None:
    before = tree_of(tiny.dataset)
    done = run_streamvid("shard", tiny.videos, tiny.dataset, *OPTIONS)
    assert "already sealed, unchanged" in done.stdout
    state = json.loads(run_streamvid("shard", tiny.videos, tiny.dataset, *OPTIONS, "--json").stdout)
    (source,) = tiny.report["input"]["sources"]
    assert state.pop("input")["sources"] == [source]  # findings of the probe are not stored
    assert state | {"state": "built"} == {name: value for name, value in tiny.report.items() if name != "input"}
    assert state["state"] == "already sealed"
    assert tree_of(tiny.dataset) == before


def test_another_plan_needs_overwrite(tiny: Tiny, tmp_path: Path) -> None:
    dataset = tmp_path / "ds"
    run_streamvid("shard", tiny.videos, dataset, *OPTIONS)
    before = tree_of(dataset)
    refused = run_streamvid("shard", tiny.videos, dataset, *OPTIONS, "--seed", "3", check=False)
    assert refused.returncode == 1
    assert "seed: 0 stored, 3 requested" in refused.stderr and "--overwrite" in refused.stderr
    assert tree_of(dataset) == before
    one_bucket = ("--buckets", "96x64@5", "--workers", "1")
    done = run_streamvid("shard", tiny.videos, dataset, *one_bucket, "--overwrite", "--json")
    assert json.loads(done.stdout)["state"] == "built"
    assert [bucket.id for bucket in streamvid.open_dataset(dataset).manifest.buckets] == ["96x64-5f"]
    assert not any("64x96-5f" in name for name in tree_of(dataset)), "shards of the old dataset remain"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--shard-size", "12XB"), "write it as 512MB"),
        (("--shard-size", "-1"), "write it as 512MB"),
        (("--shard-size", "1B"), "--shard-size 1: must be an integer from 1000 to"),
        (("--num-frames", "1,x"), "without spaces as 1,17,33"),
        (("--num-frames", "0"), "--num-frames 0: must be an integer from 1 to"),
        (("--num-frames", "1,", "17"), "without spaces as 1,17,33"),
        (("--num-frames", ","), "without spaces as 1,17,33"),
        (("--resolution", ""), "without spaces as 256px"),
        (("--resolution", "large"), "'large'"),
        (("--buckets", "100x100@5"), "nearest allowed: 96 and 112"),
        (("--buckets", "wide"), "'832x480@81'"),
        (("--buckets", ","), "',' is not a comma-separated list of items"),
        (("--buckets", "64x64@5,64x64-5f"), "more than once"),
        (("--buckets", "64x64@5", "--resolution", "256px"), "buckets and resolution cannot be combined"),
        (("--buckets", "64x64@5", "--num-frames", "5"), "--num-frames (5,) cannot be combined with buckets"),
        (("--multiple", "0"), "--multiple 0"),
        (("--val-fraction", "1"), "--val-fraction 1.0: must be at least 0 and less than 1"),
        (("--workers", "0"), "--workers 0: must be an integer from 1 to 1024"),
        (("--seed", "-1"), "--seed -1: must be an integer from 0"),
        (("--clips", "raw"), "'copy', 'native'"),
        (("--crf", "20"), "--crf 20 cannot be combined with clips.kind='copy'"),
        (("--clips", "native", "--crf", "x"), "'x' is not a number"),
        (("--clips", "native", "--codec", "vp9"), "it must be one of h264"),
        (("--clips", "native", "--fps", "1/0"), "write it as 24, 0.5 or 30000/1001"),
        (("--clips", "native", "--fps", "2000"), "above 0 and at most 1000"),
        (("--clips", "native", "--verify", "probe"), "encoding decodes every frame"),
    ],
)
def test_bad_options_are_exit_code_2_with_the_remedy(
    call: Call, tiny: Tiny, tmp_path: Path, options: tuple[str, ...], says: str
) -> None:
    done = call("shard", tiny.videos, tmp_path / "ds", *options)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr and "Traceback" not in done.stderr and not done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_size_may_have_a_unit_and_a_space(tiny: Tiny, tmp_path: Path) -> None:
    dataset = tmp_path / "ds"
    run_streamvid("shard", tiny.videos, dataset, *OPTIONS, "--shard-size", "1.5 KiB")
    assert streamvid.open_dataset(dataset).manifest.build["options"]["shard_size_bytes"] == 1536


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda root: None, "neither a folder nor a file"),
        (lambda root: root.mkdir(), "no file with a video or image extension"),
        (lambda root: (root.mkdir(), (root / "a.mp4").write_bytes(b"text")), "all records were rejected"),
        (lambda root: root.write_text("path\n"), "the name must match one of *.csv"),
    ],
    ids=["missing", "empty", "all rejected", "no metadata"],
)
def test_a_source_without_clips_gives_exit_code_1(tmp_path: Path, make: Any, says: str) -> None:
    make(tmp_path / "source")
    done = run_streamvid("shard", tmp_path / "source", tmp_path / "ds", check=False)
    assert done.returncode == 1 and "samples" not in done.stdout
    assert says in done.stderr.splitlines()[-1] and done.stderr.splitlines()[-1].startswith("error: ")
    assert not (tmp_path / "ds" / "manifest.json").exists()


def test_a_destination_with_other_content_is_left_alone(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "mine.txt").write_text("dear")
    for dest in (tmp_path / "letters", tmp_path / "letters" / "mine.txt"):
        done = run_streamvid("shard", tiny.videos, dest, *OPTIONS, "--overwrite", check=False)
        assert done.returncode == 1 and "choose an empty or new folder" in done.stderr
    assert tree_of(tmp_path) == {"letters/mine.txt": b"dear"}


def test_a_folder_of_one_video(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "clip.mp4").write_bytes((tiny.videos / "wide.mp4").read_bytes())
    done = run_streamvid("shard", tmp_path / "one", tmp_path / "ds", "--resolution", "64px", "--num-frames", "5")
    assert "1 input rows = 1 samples in 1 shards" in done.stdout
    assert streamvid.open_dataset(tmp_path / "ds").samples_table()["source"].to_pylist() == ["clip.mp4"]


def test_names_from_the_input_cannot_draw_on_the_terminal(tmp_path: Path) -> None:
    """SAFE-1: `shard` and `stats` escape a file name with an escape sequence and a line break."""
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "evil\x1b[2J\nrejected: row 9.mp4").write_bytes(b"no video")
    (tmp_path / "videos" / "clip.mp4").write_bytes(encode(frames_of("bikes", 96, 64, 6)))
    shown = on_a_terminal("shard", tmp_path / "videos", tmp_path / "ds", *OPTIONS)
    shown += on_a_terminal("stats", tmp_path / "ds")
    assert shown.count(r"evil\x1b[2J\nrejected: row 9.mp4") == 2
    assert "\x1b[2J" not in shown


def test_a_terminal_shows_a_bar(tiny: Tiny, tmp_path: Path) -> None:
    shown = on_a_terminal("shard", tiny.videos, tmp_path / "ds", *OPTIONS)
    drawn = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", shown)
    assert "\r" in drawn and re.search("probe +━+ 3/3", drawn) and re.search("build +━+", drawn)
    assert "probe 3/3\r\n" not in shown


def on_a_terminal(*arguments: object) -> str:
    """Run the command with a terminal as its output and errors; return what the terminal shows."""
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "streamvid", *map(str, arguments)]
    shown = b""
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        while select.select([controller], [], [], 60)[0]:
            try:
                shown += os.read(controller, 65536)
            except OSError:  # the other end is closed
                break
    os.close(controller)
    assert process.returncode == 0, shown
    return shown.decode()


@pytest.fixture(scope="module")
def many(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 clips, enough to interrupt the work in the middle."""
    folder = tmp_path_factory.mktemp("many")
    for number in range(120):
        (folder / f"{number}.mp4").symlink_to(tiny.videos / "wide.mp4")
    return folder


@pytest.fixture(scope="module")
def many_sharded(many: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    dataset = tmp_path_factory.mktemp("whole") / "ds"
    run_streamvid("shard", many, dataset, *OPTIONS, "--shard-size", "1KB")
    return dataset


@pytest.mark.parametrize("phase", ["probe", "build"])
def test_an_interrupt_is_exit_code_130_and_the_same_command_resumes(
    many: Path, many_sharded: Path, tmp_path: Path, phase: str
) -> None:
    """SHARD-1 and SHARD-2: the incomplete dataset is invisible, and resuming yields the bytes of an uninterrupted
    run."""
    arguments = ("shard", many, tmp_path / "ds", *OPTIONS, "--shard-size", "1KB")
    command = [sys.executable, "-m", "streamvid", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while not (line := process.stderr.readline()).startswith(f"{phase} 0/120"):
            assert line, f"phase {phase} did not start"
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=200)
    assert process.returncode == 130, errors
    assert "samples" not in output and "Traceback" not in errors
    remedy = "run the same command again (append, copy, encode, shard, train and verify resume their work)"
    assert errors.splitlines()[-1] == f"interrupted; {remedy}"
    assert not (tmp_path / "ds" / "manifest.json").exists()
    assert run_streamvid("stats", tmp_path / "ds", check=False).returncode == 1
    again = run_streamvid(*arguments, "--json")
    assert json.loads(again.stdout)["state"] == "built"
    assert tree_of(tmp_path / "ds") == tree_of(many_sharded)


def test_a_forgotten_destination_is_named(tiny: Tiny) -> None:
    done = run_streamvid("shard", tiny.videos, check=False)
    assert done.returncode == 2 and "SOURCE or DEST is missing; pass both" in done.stderr


def test_too_small_a_disk_is_reported_before_anything_is_built(tiny: Tiny, tmp_path: Path) -> None:
    """The error states the required and the free space. The video is padded to 7 GiB, and 2,000 rows name it."""
    data = next(tiny.videos.glob("*.mp4")).read_bytes()
    with (tmp_path / "large.mp4").open("wb") as file:
        file.write(data + (1).to_bytes(4, "big") + b"free" + (7 << 30).to_bytes(8, "big"))
        file.truncate(len(data) + (7 << 30))
    (tmp_path / "metadata.csv").write_text("path\n" + "large.mp4\n" * 2000)
    flags = [*OPTIONS, "--max-clip-bytes", "7.9GiB", "--whole-files"]
    done = run_streamvid("shard", tmp_path, tmp_path / "ds", *flags, check=False)
    assert done.returncode == 1 and not (tmp_path / "ds" / "shards").exists()
    assert "the shards need 15,03" in done.stderr and "run the same command again to resume" in done.stderr
