"""Tests of VideoLoader(features=…): precomputed features are delivered like video, at the same samples and steps."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import streamvid
from streamvid import DatasetConfig, World
from streamvid.dataset import tar
from streamvid.dataset.features.sidecar import open_sidecar
from streamvid.dataset.features.tensors import RawTensor
from streamvid.dataset.versions.open import open_dataset
from streamvid.errors import ConfigError, SampleError
from streamvid.loader.batch.features import collate, raw_tensor, torch_tensor
from tests.dataset.samples import edit_manifest
from tests.files import tree_of
from tests.loader.conftest import SMALL, TALL, build_dataset, open_loader, state_after
from tests.loader.sidecars import check_tensors, facts_of, make_sidecar, name_of, received, run
from tests.servers import S3Env, S3Server

NUM_SAMPLES = 23


@pytest.fixture(scope="module")
def sidecar(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sidecar(tmp_path_factory.mktemp("sidecar") / "s", dataset)


# Delivery.


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_each_sample_is_delivered_once_per_epoch_with_its_own_tensors(
    dataset: Path, sidecar: Path, num_ranks: int
) -> None:
    """PLAN-2: the number of samples is odd. Visit v delivers the stored visit v modulo the number of stored visits."""
    seen: Counter[tuple[int, str]] = Counter()
    for rank in range(num_ranks):
        world = World(rank, num_ranks)
        with open_loader(dataset, features=sidecar, batch_size=2, world=world, num_epochs=3, tail="uneven") as loader:
            for batch in loader:
                assert "video" not in batch and "clips" not in batch and "layout" not in batch
                check_tensors(batch, loader.epoch)
                seen.update((loader.epoch, key) for key in batch.sample_keys)
    assert len(seen) == 3 * NUM_SAMPLES and set(seen.values()) == {1}


def test_all_fields_except_the_video_are_unchanged(dataset: Path, tmp_path: Path) -> None:
    """SAMPLE-1, PLAN-1: keys, captions, seeds, weights and columns agree step by step, as long as visits are stored.

    This includes drawn captions. Later visits have the captions of the stored visit, and dropout is drawn anew.
    """
    config = DatasetConfig(dataset, captions={"column": {"text": 1, "place": 1}, "dropout": 0.3})
    options: dict[str, Any] = {"batch_size": 3, "num_workers": 0, "num_epochs": 4, "columns": ["score"], "tail": "pad"}
    options |= {"accumulate": 2, "view": {"max_interval": 2}}
    root = make_sidecar(tmp_path / "s", dataset, view=facts_of(config, view={"max_interval": 2}))
    texts: dict[tuple[str, int], set[str]] = {}
    num_dropped = [0] * 4
    with (
        streamvid.VideoLoader(config, **options) as one,
        streamvid.VideoLoader(config, features=root, **options) as two,
    ):
        for video, tensors in zip(one, two, strict=True):
            for name in ("sample_keys", "sample_seeds", "loss_weight", "bucket"):
                assert video[name] == tensors[name], name
            for name in ("is_repeat", "score"):
                assert torch.equal(video[name].nan_to_num(), tensors[name].nan_to_num()), name
            assert [not text for text in video.text] == [not text for text in tensors.text]
            for place, is_repeat in enumerate(video.is_repeat.tolist()):
                if one.epoch < 2 and not is_repeat:  # visits of repeats are not stored
                    assert (video.text[place], video.fps[place]) == (tensors.text[place], tensors.fps[place])
            num_dropped[one.epoch] += sum(not text for text in tensors.text)
            for key, text, (_, visit) in zip(tensors.sample_keys, tensors.text, tensors.who.tolist(), strict=True):
                texts.setdefault((key, visit), set()).update([text] if text else [])
        assert one.epoch == two.epoch == 4
    assert max(map(len, texts.values())) == 1 and any(num_dropped[0] != other for other in num_dropped)
    both = [texts[key, 0] | texts.get((key, 1), set()) for key, _ in texts]
    assert any(len(one) == 2 for one in both)  # otherwise, no caption was drawn


def test_processes_that_share_a_batch_can_compare_it(dataset: Path, sidecar: Path) -> None:
    """The digest covers keys, texts and tensors."""
    batch = next(iter(open_loader(dataset, features=sidecar, batch_size=3)))
    digest = batch.digest()
    assert batch.clone().digest() == batch.to("cpu").digest() == digest
    other = batch.latents.clone()
    other[2, 1, 2] += 1
    for changed in ({"latents": other}, {"text": ["a", "b", "c"]}, {"sample_keys": batch.sample_keys[::-1]}):
        assert batch.with_fields(changed).digest() != digest


def test_workers_change_nothing(dataset: Path, sidecar: Path) -> None:
    """PLAN-5: the caller's own threads and worker processes read the same batches."""
    alone = run(dataset, features=sidecar, num_epochs=2)
    assert run(dataset, features=sidecar, num_epochs=2, num_workers=2) == alone and len(alone) >= 2 * 10
    assert run(dataset, features=open_sidecar(sidecar), num_epochs=2, device="cpu") == alone


@pytest.mark.parametrize("num_done", [1, 7, 13])
def test_a_state_resumes_at_its_position(dataset: Path, sidecar: Path, num_done: int) -> None:
    """RESUME-1: the state is saved in the middle of an epoch. A state of a video run can be used, too."""
    options: dict[str, Any] = {"batch_size": 2, "num_workers": 0, "num_epochs": 2}
    whole = run(dataset, features=sidecar, num_epochs=2)
    for first in ({"features": sidecar}, {"output": {"decode": False}}):
        state = state_after(num_done, dataset, **options, **first)
        with open_loader(dataset, state, features=sidecar, **options) as loader:
            assert [received(batch) for batch in loader] == whole[num_done:]


def test_filters_and_mixtures(dataset: Path, sidecar: Path, tmp_path: Path) -> None:
    """PLAN-5: `where` works, and so does a mix of two datasets, each with precomputed features for its own seed."""
    for batch in open_loader(dataset, features=sidecar, where="score > 4"):
        check_tensors(batch, 0)
    other = build_dataset(tmp_path / "other", {SMALL: [3, 2], TALL: [2]}, variants=1)
    datasets = [DatasetConfig(dataset, name="a"), DatasetConfig(other, name="b", num_repeats=2)]
    with open_loader(datasets, batch_size=2) as loader:
        facts = loader.view_facts
    assert facts[0]["seed"] != facts[1]["seed"]
    roots = [
        make_sidecar(tmp_path / str(number), root, view=view)
        for number, (root, view) in enumerate(zip((dataset, other), facts, strict=True))
    ]
    with open_loader(datasets, features=roots, batch_size=2, tail="pad") as loader:
        batches = list(loader)
    assert sum(len(batch.sample_keys) for batch in batches) >= NUM_SAMPLES + 2 * 7
    for batch in batches:
        assert [who[0] for who in batch.who.tolist()] == [name_of(key) for key in batch.sample_keys]
    with pytest.raises(ConfigError, match="seed is .* in the features, but .* here"):
        streamvid.VideoLoader(datasets, features=[sidecar, roots[1]], batch_size=2)
    with pytest.raises(ConfigError, match="features: the number of entries is 1, but must be 2: one per dataset"):
        streamvid.VideoLoader(datasets, features=sidecar, batch_size=2)


# Remote stores.


def test_a_bucket_gives_the_same_batches_as_the_disk(
    dataset: Path, sidecar: Path, moto_server: S3Server, s3_env: S3Env, tmp_path: Path
) -> None:
    """FETCH-2: the dataset, the features or both are in a bucket, read with and without a worker and a cache.

    Features are also written to a bucket.
    """
    s3_env(moto_server)
    bucket = moto_server.new_bucket()
    moto_server.upload_folder(dataset, bucket, "dataset/")
    moto_server.upload_folder(sidecar, bucket, "sidecar/")
    far, far_sidecar = f"s3://{bucket}/dataset", f"s3://{bucket}/sidecar"
    cache: dict[str, Any] = {"storage": {"cache_dir": tmp_path / "cache", "cache_bytes": 1 << 26}}
    options: dict[str, Any] = {"num_epochs": 2, "world": World(1, 2)}
    wanted = run(dataset, features=sidecar, **options)
    assert run(far, features=sidecar, **options) == wanted
    assert run(dataset, features=far_sidecar, **options, num_workers=1) == wanted
    assert run(far, features=far_sidecar, **options, **cache) == wanted
    with open_loader(far, features=far_sidecar, batch_size=2, **options, **cache) as loader:
        assert [received(batch) for batch in loader] == wanted
        stats = loader.stats()
    assert stats.store is not None and stats.cache is not None and stats.cache.hits > 0
    make_sidecar(f"s3://{bucket}/made", dataset)  # type: ignore[arg-type]
    assert moto_server.tree(bucket, "made") == tree_of(sidecar)


# Bad samples.


def damage(root: Path, source: Path, key: str, visit: int) -> None:
    """Change one byte of a stored member."""
    for shard in open_dataset(source).shards:
        path = root / shard.path
        for member in tar.scan_tar(io.BytesIO(path.read_bytes())):
            if member.name == f"{key}.v{visit}.safetensors":
                stored = bytearray(path.read_bytes())
                stored[member.offset + member.num_bytes - 1] ^= 1
                path.write_bytes(stored)
                return
    raise AssertionError(key)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_corrupt_member_is_substituted_only_at_its_visit(dataset: Path, tmp_path: Path, num_workers: int) -> None:
    """BAD-1: another sample of its bucket is delivered instead, marked as a repeat, and reported with the reason.

    The substitute is the same in each run, whatever was found bad before. Missing features are replaced in the same
    way.
    """
    bad, missing = "96x64-5f-1", "64x96-9f-4"
    root = make_sidecar(tmp_path / "s", dataset, missing=[(missing, 1)])
    damage(root, dataset, bad, 0)
    options: dict[str, Any] = {"batch_size": 1, "num_epochs": 3, "tail": "uneven", "num_workers": num_workers}
    runs = []
    for _ in range(2):
        with streamvid.VideoLoader(dataset, features=root, **options) as loader:
            got = [(loader.epoch, batch) for batch in loader]
            told = [(one.key, one.reason) for one in loader.substituted]
        runs.append([received(batch) for _, batch in got])
        assert [key for key, _ in told] == [bad, missing, bad]
        assert "checksum in the index" in told[0][1] and "could not be computed" in told[1][1]
        for epoch in range(3):
            here = [batch for number, batch in got if number == epoch]
            lost = {missing} if epoch == 1 else {bad}
            assert {k for b in here for k in b.sample_keys} == {
                key for shard in open_dataset(dataset).shards for key in all_keys(dataset, shard)
            } - lost
            (substitute,) = (batch for batch in here if batch.is_repeat.item())
            assert substitute.who[0, 0].item() == name_of(substitute.sample_keys[0])
    assert runs[0] == runs[1]
    with streamvid.VideoLoader(dataset, features=root, **options) as loader:
        loader.set_epoch(1)  # the epoch in which the corrupt member is not read
        assert [received(batch) for batch in loader] == [r for r, (epoch, _) in zip(runs[0], got, strict=True) if epoch]


def all_keys(dataset: Path, shard: Any) -> list[str]:
    keys: list[str] = open_dataset(dataset).samples(shard, ["key"]).column("key").to_pylist()
    return keys


def test_a_bucket_without_a_good_sample_is_an_error(tmp_path: Path) -> None:
    """BAD-1: one sample is corrupt, and the other has no features."""
    source = build_dataset(tmp_path / "d", {SMALL: [2]})
    root = make_sidecar(tmp_path / "s", source, missing=[("96x64-5f-1", 0)], num_visits=1)
    damage(root, source, "96x64-5f-0", 0)
    with (
        open_loader(source, features=root) as loader,
        pytest.raises(SampleError, match="No other sample in its bucket can replace it"),
    ):
        list(loader)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (
            lambda v: v["tensors"].pop("latents"),
            r"has the tensors \['latents', 'tokens', 'who'\], but must have \['tokens', 'who'\]",
        ),
        (lambda v: v["tensors"].update(more={"dtype": "F32", "is_ragged": False}), "must have \\['latents', 'more'"),
        (
            lambda v: v["tensors"]["latents"].update(dtype="F16"),
            "tensor 'latents' of dtype BF16 .* does not match the manifest",
        ),
        (lambda v: v["tensors"]["tokens"].update(is_ragged=False), "tensor 'tokens': all tensors in a batch must"),
    ],
)
def test_members_that_do_not_match_the_manifest_are_an_error(
    dataset: Path, tmp_path: Path, change: Any, wrong: str
) -> None:
    """SAFE-1: their checksums are correct, and the error names the sample."""
    root = make_sidecar(tmp_path / "s", dataset, null=None)
    edit_manifest(root, change)
    with (
        open_loader(dataset, features=root, batch_size=6) as loader,
        pytest.raises(SampleError, match=f"sample .* cannot be delivered: .*{wrong}"),
    ):
        list(loader)


# Invalid arguments.


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"view": {"temporal": "head"}}, ['temporal is "random" in the features, but "head" here']),
        ({"view": {"max_interval": 3}}, ["max_interval is 1 in the features, but 3 here"]),
        ({"view": {"spatial": "random_crop"}}, ['spatial is "resize_crop" in the features, but "random_crop" here']),
        (
            {"view": {"spatial": "rand_size_crop", "spatial_scale": (0.5, 1.0)}, "seed": 4},
            [
                'spatial is "resize_crop"',
                r"spatial_scale is null in the features, but \[0.5, 1.0\] here",
                "seed is 0 in the features, but 4 here",
            ],
        ),
        ({"output": {"accuracy": "exact"}}, ['accuracy is null in the features, but "exact" here']),
    ],
)
def test_other_views_are_refused_by_name(
    dataset: Path, sidecar: Path, options: dict[str, Any], named: Sequence[str]
) -> None:
    """The error names only the options that changed, with both values and the remedy."""
    for name in named:
        with pytest.raises(ConfigError, match=f"{name}.*streamvid encode"):
            streamvid.VideoLoader(dataset, features=sidecar, batch_size=1, **options)
    with pytest.raises(ConfigError) as caught:
        streamvid.VideoLoader(dataset, features=sidecar, batch_size=1, **options)
    assert str(caught.value).count(" in the features, but ") == len(named)


def test_captions_are_part_of_a_view_and_dropout_is_not(dataset: Path, sidecar: Path) -> None:
    streamvid.VideoLoader(DatasetConfig(dataset, captions={"dropout": 0.5}), features=sidecar, batch_size=1).close()
    for changed, name in (
        ({"captions": {"prefix": "a video of "}}, 'caption_prefix is "" in the features, but "a video of " here'),
        (
            {"captions": {"column": "place"}},
            "caption_column.place is not set in the features, but 1.0 here; caption_column.text is 1.0",
        ),
        ({"captions": {"choice": "first"}}, 'caption_choice is "draw" in the features, but "first" here'),
        ({"captions": {"template": "{text}!"}}, "caption_template is null in the features"),
    ):
        with pytest.raises(ConfigError, match=name):
            streamvid.VideoLoader(DatasetConfig(dataset, **changed), features=sidecar, batch_size=1)


def test_new_columns_invalidate_a_sidecar_only_if_captions_use_them(tmp_path: Path) -> None:
    """A new caption invalidates precomputed features. A new score or a caption that is not read does not."""
    source = build_dataset(tmp_path / "d", {SMALL: [3]})
    root = make_sidecar(tmp_path / "s", source, num_visits=1)
    keys = [key for shard in open_dataset(source).shards for key in all_keys(source, shard)]

    def annotate(**columns: object) -> None:
        rows = "".join(json.dumps({"key": key, **columns}) + "\n" for key in keys)
        (tmp_path / "a.jsonl").write_text(rows)
        streamvid.annotate(source, tmp_path / "a.jsonl", caption_column="caption" if "caption" in columns else None)

    annotate(motion=0.5)
    options: dict[str, Any] = {"features": root, "batch_size": 1, "num_workers": 0}
    assert len(run(source, columns=["motion"], **options)) == 3
    annotate(caption="all new")
    with pytest.raises(ConfigError, match='caption_values is null in the features, but ".*" here'):
        streamvid.VideoLoader(source, **options)
    unread = DatasetConfig(source, captions={"column": "place"})
    again = make_sidecar(tmp_path / "again", source, num_visits=1, view=facts_of(unread))
    annotate(caption="newer still")
    assert len(run(unread, **options | {"features": again})) == 3


def test_a_sidecar_of_another_dataset_is_refused(dataset: Path, sidecar: Path, tmp_path: Path) -> None:
    other = build_dataset(tmp_path / "other", {SMALL: [5, 4, 3], TALL: [6, 5]}, variants=1)
    with pytest.raises(
        ConfigError, match="were created from a dataset other than .*fingerprints.content is .* in the features, but "
    ):
        streamvid.VideoLoader(other, features=sidecar, batch_size=1)


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"output": {"decode": False}}, "output.decode=False cannot be combined with features"),
        ({"media": ("mask",)}, "media"),
        ({"columns": ("who",)}, "unknown|not a column of the dataset"),
        ({"features": []}, "features: the number of entries is 0, but must be 1: one per dataset"),
        ({"features": [None]}, "None cannot be used with .* a path, a URL or an open Sidecar"),
        ({"features": 3}, "features=3: must be a path"),
        ({"limits": {"prefetch_bytes": -1}}, "prefetch_bytes"),
    ],
)
def test_arguments_that_cannot_be_combined(dataset: Path, sidecar: Path, options: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        streamvid.VideoLoader(dataset, **{"features": sidecar, "batch_size": 1, **options})


def test_tensors_cannot_have_the_names_of_batch_fields(dataset: Path, tmp_path: Path) -> None:
    one = {"text": RawTensor("U8", (1,), b"1"), "score": RawTensor("U8", (1,), b"1")}
    root = make_sidecar(tmp_path / "s", dataset, encode=lambda key, visit: one, null=None, num_visits=1)
    with pytest.raises(ConfigError, match="contain tensors with the names of other batch fields: text"):
        streamvid.VideoLoader(dataset, features=root, batch_size=1)
    with pytest.raises(ConfigError, match="names of other batch fields: score, text"):
        streamvid.VideoLoader(dataset, features=root, batch_size=1, columns=["score"])


# Tensors.

DTYPES = ("int64", "float64", "float32", "int32", "bfloat16", "float16", "int16", "float8_e4m3fn", "float8_e5m2", "int8",
          "uint8", "bool")  # fmt: skip


@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.lists(st.integers(1, 3), max_size=2),
)
def test_collate_pads_and_masks(dtype: str, lengths: list[int], rest: list[int]) -> None:
    """For every dtype, each sample keeps its own values, and all padding is 0."""
    kind = getattr(torch, dtype)
    tensors = [torch.randint(0, 2, (length, *rest)).to(kind) for length in lengths]
    fields = collate({"x": tensors, "y": [torch.ones(2, dtype=kind)] * len(lengths)}, {"x"})
    x, mask = fields["x"], fields["x_mask"]
    assert x.dtype == kind and x.shape == (len(lengths), max(lengths), *rest) and mask.dtype == torch.bool
    assert mask.tolist() == [[place < length for place in range(max(lengths))] for length in lengths]
    for row, is_there, one in zip(x, mask, tensors, strict=True):
        assert torch.equal(row[is_there].float(), one.float()) and not row[~is_there].float().any()
    assert fields["y"].shape == (len(lengths), 2) and fields["y"].float().sum() == 2 * len(lengths)
    for one in tensors:
        again = torch_tensor(raw_tensor(one, is_ragged=True))
        assert again.dtype == kind and again.shape == one.shape and torch.equal(again.float(), one.float())


def test_collate_names_tensors_that_do_not_match() -> None:
    with pytest.raises(
        ConfigError,
        match=r"tensor 'x': all tensors in a batch must have the same dtype and shape, but these are torch.float32 \(1,\), torch.float32 \(2,\)",
    ):
        collate({"x": [torch.ones(1), torch.ones(2)]})
    with pytest.raises(ConfigError, match="tensor 'x'"):
        collate({"x": [torch.ones(1, 2), torch.ones(2, 3)]}, {"x"})
    with pytest.raises(ConfigError, match="tensor 'x'"):
        collate({"x": [torch.ones(()), torch.ones(())]}, {"x"})
    with pytest.raises(ConfigError, match="dtype=torch.complex64 cannot be stored"):
        raw_tensor(torch.ones(1, dtype=torch.complex64))


def test_an_index_that_does_not_match_its_shard_is_an_error(dataset: Path, tmp_path: Path) -> None:
    """PLAN-6: there is one small file per shard, which is verified when its shard is read, and not before."""
    root = make_sidecar(tmp_path / "s", dataset)
    path = next((root / "index").glob("96x64-5f-000001.parquet"))
    path.write_bytes(path.read_bytes()[::-1])
    with (
        open_loader(dataset, features=root, shuffle="none") as loader,
        pytest.raises(SampleError, match=f"checksum mismatch in .*{path.name}; copy the file again"),
    ):
        for number, _ in enumerate(loader):
            assert number < NUM_SAMPLES
