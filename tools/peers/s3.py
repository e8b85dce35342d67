"""Other loaders over the same clips in an S3 bucket: one cold epoch of one of them, in a process of its own.

    .peers/bin/python -m tools.peers.s3             (from the root of the checkout)

Reads one JSON line: {"method", "endpoint", "bucket" (what tools.peers.convert wrote, uploaded), "num_samples",
"workers", "batch_size", "scratch" (an empty folder, for what they keep of it)}; keys and region are in the environment.
Answers with one line, see `run`, or {"error"}.

Each reads S3 as its authors have it: webdataset through curl (signed URLs), mosaic streaming and litdata whole chunks
into a local folder (boto3; obstore), Energon through NVIDIA's MSC. All go in stored order, at their defaults.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from tools.peers.clips import stand_in_for_torchvision
from tools.peers.loader import (
    NEEDS,
    Batch,
    Job,
    cpu_seconds_of_tree,
    energon_of,
    keep,
    of_rows,
    to_data_loader,
    touch,
    webdataset_of,
)

SIGNED_SECONDS = 3600


@dataclass(frozen=True)
class Place:
    """Where the clips are, and what is asked for."""

    endpoint: str
    bucket: str
    scratch: Path
    job: Job


def webdataset(place: Place) -> Iterable[Batch]:
    """The tars by signed URLs, which webdataset hands to curl."""
    botocore, boto3 = import_module("botocore.config"), import_module("boto3")
    config = botocore.Config(s3={"addressing_style": "path"}, signature_version="s3v4")
    client = boto3.client("s3", endpoint_url=place.endpoint, config=config)
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=place.bucket, Prefix="webdataset/")
    keys = [found["Key"] for page in pages for found in page["Contents"]]
    urls = [
        client.generate_presigned_url("get_object", {"Bucket": place.bucket, "Key": key}, ExpiresIn=SIGNED_SECONDS)
        for key in sorted(keys)
    ]
    return webdataset_of(place.job, urls)


def energon(place: Place) -> Iterable[Batch]:
    """The tars and their offsets through MSC."""
    options = {"base_path": place.bucket, "endpoint_url": place.endpoint, "region_name": "us-east-1"}
    keys = {"access_key": os.environ["AWS_ACCESS_KEY_ID"], "secret_key": os.environ["AWS_SECRET_ACCESS_KEY"]}
    profile = {
        "storage_provider": {"type": "s3", "options": options},
        "credentials_provider": {"type": "S3Credentials", "options": keys},
    }
    config = place.scratch / "msc.json"
    config.write_text(json.dumps({"profiles": {"bench": profile}}))
    os.environ["MSC_CONFIG"] = str(config)
    return energon_of(place.job, "msc://bench/energon")


def litdata(place: Place) -> Iterable[Batch]:
    """litdata's StreamingDataLoader over its chunks, which it keeps in a folder."""
    from litdata import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(
        f"s3://{place.bucket}/litdata",
        cache_dir=str(place.scratch / "litdata"),
        shuffle=False,
        drop_last=False,
        storage_options={
            "endpoint_url": place.endpoint,
            "aws_access_key_id": os.environ["AWS_ACCESS_KEY_ID"],
            "aws_secret_access_key": os.environ["AWS_SECRET_ACCESS_KEY"],
            "region_name": "us-east-1",
        },
    )
    return StreamingDataLoader(  # type: ignore[no-any-return]
        dataset,
        batch_size=place.job.batch_size,
        num_workers=place.job.workers,
        collate_fn=partial(of_rows, collate=keep),
    )


def mosaic(place: Place) -> Iterable[Batch]:
    """torch's DataLoader over mosaic's StreamingDataset, which keeps its shards in a folder."""
    from streaming import StreamingDataset

    os.environ["S3_ENDPOINT_URL"] = place.endpoint
    dataset = StreamingDataset(
        remote=f"s3://{place.bucket}/mosaic",
        local=str(place.scratch / "mosaic"),
        shuffle=False,
        batch_size=place.job.batch_size,
    )
    return to_data_loader(place.job, dataset, partial(of_rows, collate=keep))


METHODS: dict[str, Callable[[Place], Iterable[Batch]]] = {
    "webdataset": webdataset,
    "energon": energon,
    "litdata": litdata,
    "mosaic": mosaic,
}


def run(method: str, place: Place) -> dict[str, float]:
    """One epoch, from before the loader is made to its last batch; imports are done.

    num_samples; useful_bytes, of the clips; seconds; first_batch_seconds; cpu_seconds, of all processes.
    """
    began, cpu = time.perf_counter(), cpu_seconds_of_tree()
    first_batch, num_samples, num_bytes = 0.0, 0, 0
    for batch in METHODS[method](place):
        num_samples += touch(batch)
        num_bytes += sum(map(len, batch))
        first_batch = first_batch or time.perf_counter() - began
    seconds = time.perf_counter() - began
    spent = cpu_seconds_of_tree() - cpu
    if num_samples != place.job.num_samples:
        raise ValueError(f"{num_samples} samples came of {place.job.num_samples}")
    return {
        "num_samples": num_samples,
        "useful_bytes": num_bytes,
        "seconds": seconds,
        "first_batch_seconds": first_batch,
        "cpu_seconds": spent,
    }


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """One request's answer; {"error": why} where the peer cannot do it."""
    method = request.get("method")
    stand_in_for_torchvision()
    if method not in METHODS:
        return {"error": f"method is {method!r}, there are {sorted(METHODS)}"}
    try:
        __import__("torch").set_num_threads(1)
        for name in (NEEDS[method], "boto3"):
            __import__(name)
        scratch = Path(request["scratch"])
        job = Job(scratch, int(request["workers"]), int(request["batch_size"]), keep, int(request["num_samples"]))
        return dict(run(method, Place(request["endpoint"], request["bucket"], scratch, job)))
    except Exception as error:  # noqa: BLE001  # whatever a peer raises is its answer
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Answer one line of standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    found = answer(json.loads(sys.stdin.readline()))
    gc.collect()
    answers.write(json.dumps(found) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
