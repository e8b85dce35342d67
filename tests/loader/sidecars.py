"""Precomputed features whose tensors identify their sample and visit, created without an encoder."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import streamvid
from streamvid.dataset.features.tensors import RawTensor
from streamvid.dataset.features.writer import SidecarWriter
from streamvid.dataset.manifest import ShardInfo
from streamvid.dataset.reader import Dataset
from streamvid.dataset.versions.open import open_dataset
from streamvid.loader.batch.features import raw_tensor
from streamvid.plan.hashing import hash_text

Encode = Callable[[str, int], Mapping[str, RawTensor]]


def name_of(key: str) -> int:
    return hash_text(key) >> 1


def encoded(key: str, visit: int) -> dict[str, RawTensor]:
    """Return the tensors of one visit to a sample.

    who: int64 (2,), the key's number and the visit.
    latents: bfloat16 (2, 3).
    tokens: float32 (1 … 4, 2).
    """
    number = name_of(key)
    return {
        "who": raw_tensor(torch.tensor([number, visit])),
        "latents": raw_tensor(torch.arange(6).reshape(2, 3).bfloat16() + number % 7),
        "tokens": raw_tensor(torch.full((1 + number % 4, 2), 1.0 + visit), is_ragged=True),
    }


NULL = {"tokens": raw_tensor(torch.full((1, 2), -1.0))}


def facts_of(dataset: Any, **options: Any) -> dict[str, Any]:
    with streamvid.VideoLoader(dataset, batch_size=1, num_workers=0, **options) as loader:
        return loader.view_facts[0]


def make_sidecar(
    root: Path,
    source: Path,
    *,
    num_visits: int = 2,
    encode: Encode = encoded,
    missing: Collection[tuple[str, int]] = (),
    null: Mapping[str, RawTensor] | None = NULL,
    view: Mapping[str, Any] | None = None,
    **options: Any,
) -> Path:
    """Write precomputed features of a dataset for loaders with these options.

    missing: (key, visit) pairs that could not be encoded.
    """
    dataset = open_dataset(source)
    made_with = {"view": facts_of(source, **options) if view is None else dict(view)}
    writer = SidecarWriter(root, dataset, made_with, num_visits)
    for shard in dataset.shards:
        visits = [
            (key, [None if (key, visit) in missing else encode(key, visit) for visit in range(num_visits)])
            for key in keys_of(dataset, shard)
        ]
        writer.write_shard(shard, visits)
    writer.seal(null)
    return root


def keys_of(dataset: Dataset, shard: ShardInfo) -> list[str]:
    keys: list[str] = dataset.samples(shard, ["key"]).column("key").to_pylist()
    return keys


def received(batch: streamvid.Batch) -> list[object]:
    """Return a batch as plain values, with tensors as raw bytes."""
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor) and name != "fps"}
    bits = {
        name: [str(t.dtype), list(t.shape), t.reshape(-1).view(torch.uint8).tolist()] for name, t in tensors.items()
    }
    rest = [batch.bucket.id, batch.sample_keys, batch.text, batch.sample_seeds, batch.loss_weight, batch.fps.tolist()]
    return [*rest, bits]


def run(dataset: Any, **options: Any) -> list[list[object]]:
    with streamvid.VideoLoader(dataset, **{"num_workers": 0, "batch_size": 2, **options}) as loader:
        return [received(batch) for batch in loader]


def check_tensors(batch: streamvid.Batch, visit: int, num_visits: int = 2) -> None:
    """Check that each sample has its own tensors of this visit, and the null `tokens` if it has no text."""
    wanted = [[name_of(key), visit % num_visits] for key in batch.sample_keys]
    assert batch.who.tolist() == wanted and batch.who.dtype == torch.int64
    assert batch.latents.dtype == torch.bfloat16 and batch.latents.shape == (len(wanted), 2, 3)
    lengths = [1 + name_of(key) % 4 if text else 1 for key, text in zip(batch.sample_keys, batch.text, strict=True)]
    assert batch.tokens_mask.tolist() == [[i < length for i in range(max(lengths))] for length in lengths]
    for text, tokens, mask in zip(batch.text, batch.tokens, batch.tokens_mask, strict=True):
        value = 1.0 + visit % num_visits if text else -1.0
        assert tokens.tolist() == [[value * bool(one)] * 2 for one in mask]


def all_keys(dataset: Sequence[streamvid.Batch]) -> list[str]:
    return [key for batch in dataset for key in batch.sample_keys]
