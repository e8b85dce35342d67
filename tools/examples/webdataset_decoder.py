#!/usr/bin/env python3
"""A plain webdataset pipeline that reads streamvid's shards, and uses only the decoder of streamvid.

    python webdataset_decoder.py DATASET --batch-size 4

The shards are ordinary tars. webdataset therefore does the shuffling, splitting by worker and node, and resuming, with
its own limitations: ranks may have different numbers of steps, samples may be delivered more or less than once, and
there is no state to save. `streamvid.VideoLoader` has none of these limitations.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset as wds
from torch import nn

import streamvid
from streamvid.video.decode.file import decode_into

MEDIA = ("mp4", "mkv", "webm", "avi", "ts", "mpg", "flv", "jpg", "png", "webp", "bmp")


def decoder(bucket: streamvid.Bucket, seed: int = 0) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function for `.map()` that decodes a sample's members from bytes into a video, a caption and a key."""
    random = np.random.default_rng(seed)

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        facts = json.loads(sample["json"])
        clip = next(sample[extension] for extension in MEDIA if extension in sample)
        frames = np.empty((*bucket.shape, 3), np.uint8)
        # The whole clip is stored; another window of it each time is the training set's wealth.
        start = int(random.integers(facts["num_frames"] - bucket.shape[0] + 1))
        # Seeks, decodes no more than it must, and scales and crops to the array: one frame is in memory at a time.
        decode_into(clip, start, frames)
        return {"video": frames, "text": sample["txt"].decode(), "key": sample["__key__"]}

    return decode


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    video = torch.from_numpy(np.stack([sample["video"] for sample in samples])).permute(0, 4, 1, 2, 3)
    return {"video": video, "text": [s["text"] for s in samples], "keys": [s["key"] for s in samples]}


def batches(dataset: Path, batch_size: int) -> Iterator[dict[str, Any]]:
    manifest = streamvid.open_dataset(dataset).manifest
    for bucket in manifest.buckets:
        # One pipeline a bucket: a batch has one shape, and a shard lies in the folder of its bucket.
        paths = sorted(str(path) for path in (dataset / "shards" / bucket.id).glob("*.tar"))
        pipeline = wds.WebDataset(paths, shardshuffle=False, empty_check=False).map(decoder(bucket))
        yield from pipeline.batched(batch_size, collation_fn=collate, partial=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--batch-size", type=int, default=4)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(3, 16, 3, padding=1), nn.SiLU(), nn.Conv3d(16, 3, 3, padding=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen, losses, shapes = [], [], set()
    for batch in batches(options.dataset, options.batch_size):
        video = batch["video"].float() / 127.5 - 1
        x = nn.functional.adaptive_avg_pool3d(video, (min(video.shape[2], 4), 16, 16))
        noise = torch.randn_like(x)
        loss = nn.functional.mse_loss(model(0.5 * x + 0.5 * noise), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(batch["keys"])
        losses.append(loss.item())
        shapes.add(tuple(video.shape[1:]))
    print(json.dumps({"keys": seen, "losses": losses, "shapes": sorted(shapes)}))


if __name__ == "__main__":
    main()
