"""Tests of streamvid verify in real processes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from tests.conftest import run_streamvid
from tests.dataset.frozen import FROZEN
from tests.dataset.whole import flip
from tests.servers import S3Env, S3Server

NATIVE = FROZEN / "native"
TAR = "shards/96x64-5f/96x64-5f-000000.tar"


def damaged(root: Path) -> Path:
    shutil.copytree(NATIVE, root)
    flip(root / TAR, 3000)
    (root / "notes.txt").write_text("mine")
    return root


def test_a_right_dataset_is_exit_code_0(tmp_path: Path) -> None:
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    for flags, words in (((), "--deep reads every byte"), (("--deep",), "every byte was read")):
        done = run_streamvid("verify", NATIVE, *flags, env=env)
        assert done.stdout.startswith(f"OK: {NATIVE}: 4 samples in 2 shards, 14 files") and words in done.stdout
        assert "shards 2/2" in done.stderr
    assert not list((tmp_path / "streamvid" / "verify").iterdir())


def test_damage_is_exit_code_1_with_a_remedy(tmp_path: Path) -> None:
    """The report names a remedy, and following it repairs the dataset."""
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    root = damaged(tmp_path / "dataset")
    done = run_streamvid("verify", root, "--deep", check=False, env=env)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{TAR}: checksum: expected ") and "samples affected: 1 of bucket 96x64-5f" in lines[0]
    assert lines[1] == "not part of this dataset, ignored: notes.txt"
    assert lines[2] == f"1 problem(s) in 1 file(s): {root}"
    assert lines[3].endswith(f"streamvid copy SRC {root} --check-existing")
    run_streamvid("copy", NATIVE, root, "--check-existing", env=env)
    assert run_streamvid("verify", root, "--deep", env=env).stdout.count("OK: ") == 1


def test_json_is_the_whole_report(tmp_path: Path) -> None:
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = run_streamvid("verify", damaged(tmp_path / "dataset"), "--deep", "--json", check=False, env=env)
    report = json.loads(done.stdout)
    assert done.returncode == 1 and not report["is_right"] and report["num_problems"] == 1
    (problem,) = report["problems"]
    assert (problem["path"], problem["what"], problem["bucket_id"]) == (TAR, "checksum", "96x64-5f")
    assert len(problem["keys"]) == problem["num_keys"] == 1
    assert report["extra"] == ["notes.txt"] and "--check-existing" in report["remedy"]


def test_a_bucket_is_verified_with_flags_only(tmp_path: Path, moto_server: S3Server, s3_env: S3Env) -> None:
    """--endpoint-url and --region replace environment variables, and the keys never appear in the output."""
    env = {**os.environ, **s3_env(moto_server), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for name in ("AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION"):
        del env[name]
    bucket = moto_server.new_bucket()
    moto_server.upload_folder(NATIVE, bucket, "ds/")
    flags = ("--endpoint-url", moto_server.endpoint_url, "--region", "us-east-1")
    done = run_streamvid("-v", "verify", f"s3://{bucket}/ds", "--deep", *flags, env=env)
    assert done.stdout.startswith(f"OK: s3://{bucket}/ds: 4 samples in 2 shards")
    assert moto_server.secret_key not in done.stdout + done.stderr
    done = run_streamvid("verify", f"s3://{bucket}/none", *flags, env=env, check=False)
    assert done.returncode == 1 and done.stderr.startswith("error: no dataset at")


def test_wrong_usage(tmp_path: Path) -> None:
    for flags in (("--endpoint-url", "ftp://x"), ("--anon", "--profile", "p"), ("--workers", "0")):
        done = run_streamvid("verify", NATIVE, *flags, check=False)
        assert done.returncode == 2 and not done.stdout and "Traceback" not in done.stderr
