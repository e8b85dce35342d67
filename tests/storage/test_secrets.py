"""SAFE-1: tests that no secret, whatever its source, appears in our output."""

from __future__ import annotations

import logging
import os
import pickle
import re
import traceback
from pathlib import Path

import pytest

import streamvid
from streamvid.errors import StreamvidError
from streamvid.storage import StorageOptions, open_store
from tests.conftest import Sharded, run_streamvid
from tests.processes import run_python
from tests.servers import Rgw, S3Env, S3Server

SECRET, TOKEN = "CANARYsecret/with+signs", "CANARYtoken/with+signs=="

# Used with a store that refuses access, one that does not exist, and one that serves (moto accepts any key).
USES = """
import logging, pickle, sys, traceback
from pathlib import Path
from streamvid.storage import StorageOptions, open_store
logging.basicConfig(stream=open(sys.argv[1], "w"), level=logging.DEBUG, format="%(name)s|%(message)s")
profile = sys.argv[3] or None
for endpoint in sys.argv[4:]:
    options = StorageOptions(profile=profile, endpoint_url=endpoint or None, deadline_seconds=1.0)
    store = open_store(sys.argv[2], options)
    calls = [lambda: store.put("x", b"x"), lambda: store.read("x"), lambda: list(store.files())]
    calls += [lambda: store.create("y", b""), lambda: store.abort_uploads(), lambda: store.remove("x")]
    for call in calls:
        try:
            call()
        except Exception as error:
            traceback.print_exc()
            print(repr(error), error.__cause__, error.__context__)
    print(store, repr(store), vars(store)["options"], store.stats(), pickle.dumps(store))
"""


def places(source: str, folder: Path, env: dict[str, str]) -> tuple[dict[str, str], str]:
    """Return an environment with the secrets in the place that `source` names, and the profile to use."""
    keys = f"aws_access_key_id = motokey\naws_secret_access_key = {SECRET}\naws_session_token = {TOKEN}\n"
    if source == "variables":
        return {**env, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SESSION_TOKEN": TOKEN}, ""
    env = {name: value for name, value in env.items() if "KEY" not in name}
    name = {"credentials file": "AWS_SHARED_CREDENTIALS_FILE", "config file": "AWS_CONFIG_FILE"}.get(source)
    path = folder / "aws"
    path.write_text(f"[default]\n{keys}")
    if source == "profile":
        path.write_text(f"[profile mine]\n{keys}")
        return {**env, "AWS_CONFIG_FILE": str(path)}, "mine"
    if source == "endpoint":
        value = env["AWS_ENDPOINT_URL"].replace("http://", f"http://user:{SECRET.replace('/', '')}@")
        return {**env, "AWS_ACCESS_KEY_ID": "motokey", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ENDPOINT_URL": value}, ""
    assert name is not None
    return {**env, name: str(path)}, ""


def without_foreign_token(log: str) -> str:
    """Drop botocore's own DEBUG messages: they show the signed request with its token, but never the secret key."""
    ours, is_foreign = [], False
    for line in log.splitlines():
        name = line.split("|", 1)[0]
        if "|" in line and name.replace(".", "").replace("_", "").isalnum():
            is_foreign = name.startswith(("botocore", "aiobotocore"))
        if not is_foreign:
            ours.append(line)
    return "\n".join(ours)


@pytest.mark.parametrize(
    "source",
    [
        "variables",
        "profile",
        "endpoint",
        pytest.param("credentials file", marks=pytest.mark.slow),
        pytest.param("config file", marks=pytest.mark.slow),
    ],
)
def test_no_secret_in_logs_errors_and_pickles(
    source: str, rgw: Rgw, moto_server: S3Server, s3_env: S3Env, tmp_path: Path
) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    env, profile = places(source, tmp_path, {**env, **moto_server.env()})
    endpoints = [""] if source == "endpoint" else ["", rgw.endpoint_url, "http://127.0.0.1:9"]
    log = tmp_path / "log"
    url = f"s3://{moto_server.new_bucket()}/to"
    done = run_python(USES, log, url, profile, *endpoints, env=env)
    said, logged = done.stdout + done.stderr, log.read_text()
    assert "RemoteStore" in said and ("botocore" in logged or source == "endpoint")
    if source == "endpoint":
        assert "the endpoint URL must not contain a user name or a password" in said
    else:
        assert "403" in said and "refused" in said  # the expected failures occurred
    for text in (said, without_foreign_token(logged)):
        assert "CANARY" not in text
    assert not {SECRET, SECRET.replace("/", "")} & set(re.findall(r"CANARY[\w/+]*", logged))


@pytest.mark.slow
def test_no_secret_in_the_command_s_json(sharded: Sharded, moto_server: S3Server) -> None:
    """Covers a damaged dataset, a missing dataset, and commands that succeed."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    env |= moto_server.env() | {"AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SESSION_TOKEN": TOKEN}
    bucket = moto_server.new_bucket()
    moto_server.upload_folder(sharded.root, bucket, "ds/")
    moto_server.remove(bucket, next(key for key in moto_server.objects(bucket) if "shards/" in key))
    for command, path, is_json in (("verify", "ds", True), ("stats", "ds", True), ("verify", "nothing", False)):
        done = run_streamvid(command, f"s3://{bucket}/{path}", "--json", check=False, env=env)
        assert bool(done.stdout) == is_json and (done.returncode == 0) == (command == "stats"), done
        assert "CANARY" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "url",
    [
        *(f"s3://KEY:{SECRET}@bucket/x", f"s3://bucket/x?token={TOKEN}", f"s3:///KEY:{SECRET}@bucket/x"),
        *(
            f"{start}KEY:{SECRET}@bucket/x"
            for start in ("s3:/", "s3:", "//", "s3//", "S3:/", "s3;//", "s3a:/", "https:/")
        ),
    ],
)
def test_no_secret_of_a_url_in_errors_and_logs(url: str, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.DEBUG), pytest.raises(StreamvidError) as error:
        open_store(url)
    shown = "".join(traceback.format_exception(error.value)) + caplog.text + repr(error.value)
    # The traceback shows the source of the test's own call, not the value of its argument.
    assert "CANARY" not in shown
    done = run_streamvid("verify", url, "--json", check=False, cwd=tmp_path)
    assert done.returncode and "CANARY" not in done.stdout + done.stderr


def test_no_secret_of_options_in_errors() -> None:
    given = [{"secret": SECRET}, {"endpoint_url": f"http://k:{SECRET.replace('/', '')}@h"}]
    for mapping in given:
        with pytest.raises(StreamvidError) as error:
            StorageOptions.of(mapping)
        assert "CANARY" not in "".join(traceback.format_exception(error.value))
    assert b"CANARY" not in pickle.dumps(open_store("s3://bucket/x", StorageOptions(profile="mine")))


def test_no_secret_of_a_mistyped_url_in_the_errors_of_probe() -> None:
    for url in ("s3:/KEY:CANARY@b/x", "//KEY:CANARY@b/x"):
        with pytest.raises(StreamvidError) as error:
            streamvid.probe(url)
        own = [line for line in traceback.format_exception(error.value) if "streamvid.probe(url)" not in line]
        assert "CANARY" not in "".join(own)
