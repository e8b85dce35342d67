"""Tests of the object store guide: its commands exist, and its policies allow exactly what they are meant for.

The blocks of the page are counted per language, in order: json 0 is the policy of readers, json 1 that of writers, json
2 the lifecycle rule; yaml 0 is a training configuration. In bash blocks, lines that begin with streamvid are commands.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import streamvid
from streamvid.buckets.bucket import parse_buckets
from streamvid.cli.main import cli
from streamvid.config import load_config
from streamvid.errors import StorageError
from streamvid.storage import open_store
from streamvid.trainer.config import TrainConfig
from tests.cli.conftest import Tiny
from tests.servers import Rgw, S3Env, S3Server
from tests.shard_options import shard_options

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "content" / "guides" / "object-stores.md").read_text()
ABANDONED = "ds/shards/abandoned.tar"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


def policy(number: int, bucket: str, without: str = "") -> str:
    """Return a policy of the guide as a bucket policy for RGW's user `other`."""
    found = json.loads(blocks("json")[number].replace(":::bucket", f":::{bucket}"))
    for statement in found["Statement"]:
        statement["Principal"] = {"AWS": ["arn:aws:iam:::user/other"]}
        actions = statement["Action"] if isinstance(statement["Action"], list) else [statement["Action"]]
        statement["Action"] = [action for action in actions if action != without]
    found["Statement"] = [statement for statement in found["Statement"] if statement["Action"]]
    return json.dumps(found)


def actions(number: int) -> list[str]:
    return re.findall(r'"(s3:[A-Z]\w+)"', blocks("json")[number])


def commands() -> Iterator[list[str]]:
    for block in blocks("bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0] == "streamvid":
                yield words[1:]


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_commands_are_verbs_with_their_flags(words: list[str]) -> None:
    verb, *arguments = words
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    command.make_context(verb, arguments)  # raises for unknown flags


def test_the_training_config_is_valid(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(blocks("yaml")[0])
    config = load_config(TrainConfig, tmp_path / "run.yaml", [])
    data = config.data
    assert str(data.dataset).startswith("s3://") and data.storage.cache_bytes and data.storage.region


def test_the_lifecycle_rule_is_accepted(moto_server: S3Server) -> None:
    """The store accepts the rule, which aborts the incomplete uploads of killed writers."""
    rule, bucket = json.loads(blocks("json")[2]), moto_server.new_bucket()
    moto_server.client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=rule)
    kept = moto_server.client.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]
    assert [found["AbortIncompleteMultipartUpload"] for found in kept] == [{"DaysAfterInitiation": 7}]


@pytest.fixture
def theirs(rgw: Rgw) -> Iterator[str]:
    """A bucket that `other` may use only as far as a policy allows."""
    bucket = rgw.new_bucket()
    yield bucket
    rgw.client.delete_bucket_policy(Bucket=bucket)


def test_the_policy_of_readers_lets_them_read_and_nothing_else(
    theirs: str, rgw: Rgw, s3_env: S3Env, tiny: Tiny
) -> None:
    rgw.upload_folder(tiny.dataset, theirs, "ds/")
    rgw.put(theirs, "elsewhere", b"x")
    s3_env(rgw.other)
    url = f"s3://{theirs}/ds"
    with pytest.raises(StorageError, match="403"):
        streamvid.open_dataset(url)
    rgw.client.put_bucket_policy(Bucket=theirs, Policy=policy(0, theirs))
    assert keys_of(url) == keys_of(tiny.dataset)
    assert streamvid.verify_dataset(url, deep=True).is_right
    store = open_store(f"s3://{theirs}")
    for attempt in (
        lambda: list(store.files("ds")),
        lambda: store.put("ds/x", b""),
        lambda: store.remove("ds/manifest.json"),
        lambda: store.read("elsewhere"),
        # Without permission to list, a missing object is reported as "access denied".
        lambda: store.state("ds/nothing"),
    ):
        with pytest.raises(StorageError, match="403"):
            attempt()


def keys_of(dataset: Any) -> list[str]:
    with streamvid.VideoLoader(dataset, batch_size=1, num_workers=0, tail="pad") as loader:
        return [key for batch in loader for key in batch.sample_keys]


def write(server: Rgw, bucket: str, videos: Path, dataset: Path, tmp_path: Path) -> None:
    """Do all that writers do: make a dataset, abort a killed writer's upload, put a large object, copy a dataset."""
    server.client.create_multipart_upload(Bucket=bucket, Key=ABANDONED)
    options = shard_options(buckets=parse_buckets("96x64@5,64x96@5"), work_dir=tmp_path / "work", workers=1)
    streamvid.shard(videos, f"s3://{bucket}/ds", options)
    assert server.uploads(bucket) == []
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(33 * 2**20)
    store = open_store(f"s3://{bucket}/ds")
    store.put("large", large)
    store.remove("large")
    # Ceph lets users read their own objects whatever the policy says, so the source dataset is another user's.
    server.upload_folder(dataset, bucket, "ds/theirs/")
    streamvid.copy_dataset(f"s3://{bucket}/ds/theirs", f"s3://{bucket}/ds/copy", journal=tmp_path / "journal")


def test_the_policy_of_writers_is_sufficient(theirs: str, rgw: Rgw, s3_env: S3Env, tiny: Tiny, tmp_path: Path) -> None:
    s3_env(rgw.other)
    rgw.client.put_bucket_policy(Bucket=theirs, Policy=policy(1, theirs))
    write(rgw, theirs, tiny.videos, tiny.dataset, tmp_path)
    with pytest.raises(StorageError, match="403"):
        open_store(f"s3://{theirs}").put("elsewhere", b"")


@pytest.mark.slow
@pytest.mark.parametrize("action", actions(1) if blocks("json") else [])
def test_every_action_in_the_policy_of_writers_is_needed(
    action: str, theirs: str, rgw: Rgw, s3_env: S3Env, tiny: Tiny, tmp_path: Path
) -> None:
    s3_env(rgw.other)
    rgw.client.put_bucket_policy(Bucket=theirs, Policy=policy(1, theirs, without=action))
    # Without permission to list uploads, a run succeeds, but a killed writer's upload remains.
    with pytest.raises((StorageError, AssertionError), match=r"403|abandoned\.tar"):
        write(rgw, theirs, tiny.videos, tiny.dataset, tmp_path)
