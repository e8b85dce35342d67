"""Readers of other libraries, run with their own code on our datasets."""

from __future__ import annotations

import json
from pathlib import Path

from tests.processes import run_python

Members = dict[str, dict[str, str]]
"""Key of a sample → extension → SHA-256 of the member."""

_ENERGON = """
import hashlib, json, sys
import megatron.energon as energon

@energon.stateless
def as_it_is(sample):
    return sample

class AsItIs(energon.DefaultTaskEncoder):
    cookers = [energon.Cooker(as_it_is)]
    decoder = None

    @energon.stateless
    def encode_sample(self, sample):
        return sample

    def batch(self, samples):
        return samples

for root in sys.argv[1:]:
    dataset = energon.get_val_dataset(
        root, split_part="train", worker_config=energon.WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=1, task_encoder=AsItIs(),
    )
    for batch in energon.get_loader(dataset):
        for sample in batch:
            members = {k: hashlib.sha256(v).hexdigest() for k, v in sample.items() if not k.startswith("__")}
            print(json.dumps([root, sample["__key__"], members]))
"""
_WIDS = """
import hashlib, json, sys
import wids

for root, *shards in map(json.loads, sys.argv[1:]):
    found = [{"url": f"{root}/{path}", "nsamples": count} for path, count in shards]
    dataset = wids.ShardListDataset(found, cache_dir=f"{root}/../wids", keep=True, transformations=[])
    for sample in (dataset[number] for number in range(len(dataset))):
        members = {k.lstrip("."): hashlib.sha256(v.read()).hexdigest() for k, v in sample.items() if k[:2] != "__"}
        print(json.dumps([root, sample["__key__"], members]))
"""


def read_energon(*roots: Path) -> list[Members]:
    """Read the newest version of each dataset with Megatron-Energon, which uses its own metadata files there."""
    return _found(run_python(_ENERGON, *roots).stdout, roots)


def read_wids(*roots: Path) -> list[Members]:
    """Read the newest version of each dataset with wids, given the shard list from energon's metadata."""
    orders = []
    for root in roots:
        counts = json.loads((root / ".nv-meta" / ".info.json").read_bytes())["shard_counts"]
        orders.append(json.dumps([str(root), *counts.items()]))
    return _found(run_python(_WIDS, *orders).stdout, roots)


def _found(output: str, roots: tuple[Path, ...]) -> list[Members]:
    found: dict[str, Members] = {str(root): {} for root in roots}
    for line in output.splitlines():
        if line.startswith("["):
            root, key, members = json.loads(line)
            found[root][Path(key).name] = members
    return list(found.values())
