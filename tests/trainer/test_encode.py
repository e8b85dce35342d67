"""Tests of the first stage of split training: correct features, however they are made, and refused once stale."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from streamvid.buckets.bucket import Bucket, parse_buckets
from streamvid.buckets.config import BucketConfig
from streamvid.buckets.opensora import OpenSoraConfig
from streamvid.compat.diffsynth_data import NOTE
from streamvid.dataset.features.sidecar import open_sidecar
from streamvid.dataset.manifest import ShardInfo
from streamvid.dataset.versions.open import open_dataset
from streamvid.errors import ConfigError, SampleError, StateError
from streamvid.loader.batch.features import torch_tensor
from streamvid.loader.loader import VideoLoader
from streamvid.modules.config import ModelConfig, WeightsConfig
from streamvid.modules.encoding import check_fresh
from streamvid.plan import World
from streamvid.sharder import sharder
from streamvid.trainer import train
from streamvid.trainer.config import FeaturesConfig, TrainConfig
from streamvid.trainer.encode import encode
from streamvid.trainer.tasks import with_encoded
from tests.clips import encode as make_clip
from tests.clips import frames_of
from tests.files import tree_of, write_rows
from tests.loader.conftest import LONG, SMALL, TALL, build_dataset, clip_bytes
from tests.media_clips import MEDIA, make_rows
from tests.servers import S3Env, S3Server
from tests.shard_options import shard_options
from tests.trainer.configs import changed, combined
from tests.trainer.encoders import build
from tests.trainer.runs import config_of, losses_in, run, start

pytestmark = pytest.mark.timeout(240)

LAYOUT = {SMALL: [5, 4, 3], TALL: [6, 5]}
ENCODERS = "tests.trainer.encoders:build"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two buckets, five shards and 23 samples."""
    return build_dataset(tmp_path_factory.mktemp("base"), LAYOUT)


def encoding(base: Path, sidecar: Path, changes: Mapping[str, Any] | None = None) -> TrainConfig:
    """Return the configuration of a run that encodes two visits per sample."""
    usual = {
        "task": "sft:data_process",
        "data.features": FeaturesConfig(url=str(sidecar), num_visits=2),
        "model": ModelConfig(factory=ENCODERS, args={"draws": 0.5}),
    }
    return config_of(base, sidecar.parent / "out", combined(usual, changes))


def save_encoder(path: Path, factor: float = 1.0) -> None:
    """Write the encoder's weights, multiplied by `factor`."""
    vae = build().vae
    assert vae is not None
    save_file({name: tensor * factor for name, tensor in vae.state_dict().items()}, path)


def training(config: TrainConfig, output: Path, changes: Mapping[str, Any] | None = None) -> TrainConfig:
    """Return the configuration of a run that reads what another one encoded."""
    return changed(config, {"task": "sft:train", "output": output, **(changes or {})})


def files_of(root: Path) -> dict[str, bytes]:
    """Return the content of the features, without the command's note about their dataset."""
    return {path: data for path, data in tree_of(root).items() if Path(path).name != NOTE}


@pytest.fixture(scope="module")
def sidecar(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Features encoded by one uninterrupted process."""
    root = tmp_path_factory.mktemp("whole") / "sidecar"
    result = encode(encoding(dataset, root))
    assert result.is_sealed and (result.num_shards, result.num_samples, result.num_missing) == (5, 23, 0)
    return root


def stored(dataset: Path, sidecar: Path, num_visits: int) -> dict[tuple[str, int], dict[str, torch.Tensor]]:
    """Return all tensors of a sidecar by key and visit, as its reader finds them."""
    base, found = open_dataset(dataset), {}
    opened = open_sidecar(sidecar)
    for shard in base.shards:
        members, tar = opened.members(shard), (sidecar / shard.path).read_bytes()
        for row, key in enumerate(base.samples(shard, ["key"]).column("key").to_pylist()):
            for visit in range(num_visits):
                place = members.place(row, visit)
                if place is not None:
                    tensors = opened.tensors(tar[place[0] : place[0] + place[1]], key)
                    found[key, visit] = {name: torch_tensor(raw) for name, raw in tensors.items()}
    return found


def test_a_loader_of_one_shard_delivers_the_same_samples(dataset: Path) -> None:
    """SAMPLE-1: the pixels and captions of a visit are the same whether a loader has one shard or all of them."""
    opened, whole = open_dataset(dataset), {}
    options: dict[str, Any] = {
        "batch_size": 2,
        "num_workers": 0,
        "view": {"spatial": "random_crop"},
        "seed": 3,
        "tail": "uneven",
    }
    with VideoLoader(opened, num_epochs=2, **options) as loader:
        for batch in loader:
            for i, key in enumerate(batch.sample_keys):
                whole[key, loader.epoch] = (batch.video[i].clone(), batch.text[i])
    for shard in opened.shards:
        with VideoLoader(opened.only(shard), num_epochs=2, shuffle="none", **options) as loader:
            for batch in loader:
                for i, key in enumerate(batch.sample_keys):
                    video, text = whole.pop((key, loader.epoch))
                    assert torch.equal(video, batch.video[i]) and text == batch.text[i]
    assert not whole


@pytest.mark.parametrize("num_parts", [2, 3])
def test_independent_parts_write_the_same_bytes(dataset: Path, sidecar: Path, tmp_path: Path, num_parts: int) -> None:
    """SHARD-1: the jobs of an array run in any order, and the last one to finish seals the sidecar."""
    root = tmp_path / "sidecar"
    parts = [encode(encoding(dataset, root), World(rank, num_parts)) for rank in reversed(range(num_parts))]
    assert [part.is_sealed for part in parts] == [False] * (num_parts - 1) + [True]
    assert sum(part.num_samples for part in parts) == 23
    assert files_of(root) == files_of(sidecar)


def test_a_filter_of_the_dataset_excludes_no_sample(dataset: Path, sidecar: Path, tmp_path: Path) -> None:
    """All samples are encoded, even if the dataset's filter selects fewer for training."""
    source = {"url": str(dataset), "where": 'endswith(key, "1")'}
    assert encode(encoding(dataset, tmp_path / "sidecar", {"data.dataset": source})).num_samples == 23
    assert files_of(tmp_path / "sidecar") == files_of(sidecar)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_of_a_launch_make_the_same_bytes_and_each_sample_once(
    dataset: Path, sidecar: Path, tmp_path: Path, ranks: int
) -> None:
    """SHARD-1: two or three ranks share five shards and communicate only at their start."""
    processes = start(
        encoding(dataset, tmp_path / "sidecar", {"model.args": {"draws": 0.5, "log": str(tmp_path)}}), ranks
    )
    assert processes.wait() == [0] * ranks, processes.stderr()
    logs = [file.read_text().split() for file in tmp_path.glob("encoded-*")]
    assert len(logs) == ranks
    counts = Counter(key for log in logs for key in log)
    assert len(counts) == 23 and set(counts.values()) == {2}  # each sample is encoded for two visits
    assert files_of(tmp_path / "sidecar") == files_of(sidecar)


@pytest.mark.parametrize("kills", [3, pytest.param(12, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_a_killed_encoding_resumes_to_the_same_bytes_and_repeats_no_shard(
    dataset: Path, sidecar: Path, tmp_path: Path, kills: int
) -> None:
    """SHARD-1: two ranks are killed with kill -9 at seeded moments; a single rank finishes."""
    draw, root, done = random.Random(kills), tmp_path / "sidecar", set[str]()
    for number in range(kills):
        log = tmp_path / f"log-{number}"
        log.mkdir()
        args = {"draws": 0.5, "log": str(log), "pause": 0.05}
        processes = start(encoding(dataset, root, {"model.args": args}), ranks=2)
        while processes.is_alive() and not list(log.glob("encoded-*")):
            time.sleep(0.005)
        time.sleep(draw.random() * 0.4)
        for process in processes.processes:
            process.kill()
        processes.wait()
        again = {key for file in log.glob("encoded-*") for key in file.read_text().split()}
        assert not again & done, "a finished shard was encoded again"
        done |= _keys_of_finished(dataset, root)
    run(encoding(dataset, root))
    assert files_of(root) == files_of(sidecar)


def _keys_of_finished(dataset: Path, root: Path) -> set[str]:
    base = open_dataset(dataset)
    finished = [shard for shard in base.shards if not (root / ".staging").exists() or _record(root, shard).exists()]
    return {key for shard in finished for key in base.samples(shard, ["key"]).column("key").to_pylist()}


def _record(root: Path, shard: ShardInfo) -> Path:
    """Return the file that marks a shard of an unsealed sidecar as finished."""
    return root / ".staging" / f"{shard.bucket_id}-{shard.number:06d}.json"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_encoding_between_batches_and_it_resumes(
    dataset: Path, sidecar: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """STOP-1: a signal leaves only finished shards, and the next run completes the sidecar."""
    processes = start(
        encoding(dataset, tmp_path / "sidecar", {"model.args": {"draws": 0.5, "log": str(tmp_path), "pause": 0.1}})
    )
    while processes.is_alive() and not list(tmp_path.glob("encoded-*")):
        time.sleep(0.005)
    processes.send(number)
    assert processes.wait() == [128 + number], processes.stderr()
    assert not list((tmp_path / "sidecar").rglob("spool*"))
    assert encode(encoding(dataset, tmp_path / "sidecar")).is_sealed
    assert files_of(tmp_path / "sidecar") == files_of(sidecar)


def test_stored_tensors_equal_those_encoded_from_the_loader(dataset: Path, tmp_path: Path) -> None:
    """For every sample and visit, the stored tensors equal what `encode` makes of the loader's batch, in the requested
    dtype. All captions are stored, because training draws which ones are dropped."""
    source = {"url": str(dataset), "captions": {"dropout": 1.0}}
    config = encoding(
        dataset,
        tmp_path / "sidecar",
        {"model.args": {"draws": 0.0}, "data.dataset": source, "data.features.dtype": "float16"},
    )
    assert encode(config).is_sealed
    found, module = stored(dataset, tmp_path / "sidecar", 2), _module(config)
    assert len(found) == 46
    with VideoLoader(dataset, batch_size=3, num_workers=0, num_epochs=2, tail="uneven") as loader:
        for batch in loader:
            expected = module.encode(batch)
            for i, key in enumerate(batch.sample_keys):
                tensors = found[key, loader.epoch]
                assert tensors["latents"].dtype == torch.float16
                torch.testing.assert_close(tensors["latents"].float(), expected["latents"][i], atol=2e-3, rtol=2e-3)
                assert torch.equal(tensors["words"], expected["words"][i].half())
    null = open_sidecar(tmp_path / "sidecar").null
    assert torch.equal(torch_tensor(null["words"]), torch.zeros(1, 4, dtype=torch.float16))


def _module(config: TrainConfig) -> Any:
    from streamvid.modules.build import build_module

    return build_module(config.model, task="sft", seed=config.seed)


SMALL_MODEL = ModelConfig(args={"dim": 12, "depth": 1, "heads": 2})
USER_MODEL = ModelConfig(factory=ENCODERS, args={"draws": 0.0, "dropout": 0.1})


@pytest.mark.parametrize(("model", "bound"), [(SMALL_MODEL, 0.0), (USER_MODEL, 1e-5)], ids=["small", "user"])
def test_a_split_run_has_the_losses_of_one_stage(
    dataset: Path, tmp_path: Path, model: ModelConfig, bound: float
) -> None:
    """Batches, seeds, tensors, dropped captions and dropout are the same, so all losses over two epochs of two visits
    are equal: exactly with the small module, which encodes each clip separately."""
    source = {"url": str(dataset), "captions": {"dropout": 0.3}}
    config = encoding(
        dataset, tmp_path / "sidecar", {"data.dataset": source, "model": model, "num_epochs": 2, "max_steps": None}
    )
    assert encode(config).is_sealed
    train(changed(config, {"task": "sft", "output": tmp_path / "one", "data.features.url": None}))
    train(training(config, tmp_path / "split"))
    losses, split = losses_in(tmp_path / "one"), losses_in(tmp_path / "split")
    assert len(losses) > 15 and losses.keys() == split.keys()
    assert all(split[step] == pytest.approx(losses[step], rel=bound, abs=0) for step in losses)


def test_control_videos_are_encoded_too(tmp_path: Path) -> None:
    """Extra inputs are encoded in the first stage; one config serves both stages as well as a run in one stage."""
    source = write_rows(tmp_path / "metadata.jsonl", make_rows(tmp_path, 3))
    options = shard_options(buckets=parse_buckets("96x64@9"), workers=1, media=MEDIA)
    assert sharder.shard(source, tmp_path / "ds", options).num_samples == 3
    model = ModelConfig(factory="tests.trainer.encoders:build_controlled")
    changes = {"model": model, "data.extra_inputs": ("control",), "max_steps": 3, "data.batch_size": 1}
    config = encoding(tmp_path / "ds", tmp_path / "sidecar", changes)
    assert encode(config).is_sealed
    train(changed(config, {"task": "sft", "output": tmp_path / "one", "data.features.url": None}))
    train(training(config, tmp_path / "split"))
    losses = losses_in(tmp_path / "one")
    assert len(losses) == 3 and losses_in(tmp_path / "split") == pytest.approx(losses, rel=1e-5)


def test_batch_fields_are_alike_in_one_stage_and_in_two(dataset: Path, sidecar: Path) -> None:
    """Batch fields have the same names, shapes and masks whether they are encoded now or were stored before."""
    options: dict[str, Any] = {"batch_size": 2, "num_workers": 0, "seed": 0}
    module = build(draws=0.0)
    with VideoLoader(dataset, **options) as now, VideoLoader(dataset, features=sidecar, **options) as before:
        for made, read in zip(now, before, strict=True):
            made = with_encoded(made, module.encode(made))
            assert made.sample_keys == read.sample_keys and made.sample_seeds == read.sample_seeds
            for name in ("latents", "words", "words_mask"):
                assert made[name].shape == read[name].shape
            assert torch.equal(made.words_mask, read.words_mask)


def test_bad_samples_have_no_tensors(tmp_path: Path) -> None:
    """BAD-1: a bad sample's substitute is not stored in its place; a shard of bad samples only has no tensors, and
    readers substitute other samples."""
    layout: dict[Bucket, list[int]] = {SMALL: [4, 1, 3], LONG: [2]}
    cut = clip_bytes(0, SMALL.width * 2, SMALL.height * 2, 24)[:3000]
    bad = [f"{SMALL.id}-{number}" for number in (1, 4, 7)]
    dataset = build_dataset(tmp_path / "ds", layout, damage=dict.fromkeys(bad, cut))
    config = encoding(dataset, tmp_path / "sidecar", {"model.args": {"draws": 0.0}, "data.features.dtype": "bfloat16"})
    result = encode(config)
    assert result.is_sealed and result.num_samples == 10 and result.num_missing == 6
    assert open_sidecar(tmp_path / "sidecar").manifest.num_missing == 6
    found = stored(dataset, tmp_path / "sidecar", 2)
    keys = [f"{bucket.id}-{i}" for bucket, sizes in layout.items() for i in range(sum(sizes))]
    assert sorted(found) == sorted((key, visit) for key in keys if key not in bad for visit in range(2))
    module = _module(config)
    with VideoLoader(dataset, batch_size=1, num_workers=0) as loader:
        for batch in loader:
            if not batch.is_repeat.item():
                expected = module.encode(batch)["latents"][0].bfloat16()
                torch.testing.assert_close(found[batch.sample_keys[0], 0]["latents"], expected)
    with VideoLoader(dataset, features=tmp_path / "sidecar", batch_size=1, num_workers=0) as loader:
        delivered = [(batch.sample_keys[0], batch.is_repeat.item()) for batch in loader]
    assert len(delivered) == 10 and sum(repeat for _, repeat in delivered) == 3
    assert not {key for key, _ in delivered} & set(bad)


def test_clips_that_several_buckets_store_are_encoded_in_all_of_them(tmp_path: Path) -> None:
    """PLAN-4: a clip has tensors in every bucket that an epoch may draw for it."""
    videos = tmp_path / "videos"
    videos.mkdir()
    for number in range(4):
        (videos / f"clip{number}.mp4").write_bytes(make_clip(frames_of("bikes", 144, 96, 19)[number % 2 :]))
    form = {"64px": {9: [0.5, 2], 17: [0.75, 1]}, "96px": {9: [0.5, 1]}}
    buckets = BucketConfig(opensora=OpenSoraConfig(bucket_config=form, probabilities="opensora-v2"), assign="all")
    sharder.shard(videos, tmp_path / "ds", shard_options(bucket_config=buckets, workers=1))
    base = open_dataset(tmp_path / "ds")
    assert base.manifest.draws
    result = encode(encoding(tmp_path / "ds", tmp_path / "sidecar", {"model.args": {"draws": 0.0}}))
    assert result.is_sealed and result.num_samples == base.manifest.counts.samples > 4
    with VideoLoader(base, features=tmp_path / "sidecar", batch_size=1, num_workers=0, num_epochs=4) as loader:
        assert not any(batch.is_repeat.any() for batch in loader)


def test_a_bucket_gets_the_bytes_of_a_folder(
    dataset: Path, sidecar: Path, tmp_path: Path, moto_server: S3Server, s3_env: S3Env
) -> None:
    """FETCH-2, SHARD-1: in an object store, two parts write the same bytes as in a folder, and training reads them."""
    s3_env(moto_server)
    bucket = moto_server.new_bucket()
    moto_server.upload_folder(dataset, bucket, "dataset/")
    config = changed(
        encoding(dataset, tmp_path / "sidecar"),
        {"data.dataset": f"s3://{bucket}/dataset", "data.features.url": f"s3://{bucket}/sidecar"},
    )
    assert [encode(config, World(rank, 2)).is_sealed for rank in range(2)] == [False, True]
    assert moto_server.tree(bucket, "sidecar") == files_of(sidecar)
    assert train(training(config, tmp_path / "out", {"max_steps": 2})).step == 2


def test_too_many_bad_samples_end_the_encoding(tmp_path: Path) -> None:
    """BAD-1: the run fails above the allowed fraction of bad samples, also for a shard without a good sample."""
    cut = clip_bytes(0, SMALL.width * 2, SMALL.height * 2, 24)[:3000]
    dataset = build_dataset(tmp_path / "ds", {SMALL: [3, 12]}, damage={f"{SMALL.id}-{n}": cut for n in range(3, 15)})
    with pytest.raises(SampleError, match="max_bad_fraction"):
        encode(encoding(dataset, tmp_path / "sidecar"))
    lenient = encode(encoding(dataset, tmp_path / "sidecar", {"data.loader": {"limits": {"max_bad_fraction": 1.0}}}))
    assert lenient.is_sealed and lenient.num_missing == 24


STALE: dict[str, tuple[dict[str, Any], str]] = {
    "temporal": (
        {"data.loader": {"view": {"temporal": "head"}}},
        r'temporal is "random" in the features, but "head" here',
    ),
    "seed": ({"seed": 1}, r"seed is 0 in the features, but 1 here"),
    "args": (
        {"model": ModelConfig(factory=ENCODERS, args={"draws": 0.25})},
        r"args.draws is 0.5 in the features, but 0.25 here",
    ),
    "captions": ({"data.dataset": {"url": "DATASET", "captions": {"prefix": "A film: "}}}, r"caption_prefix"),
}


@pytest.mark.parametrize("what", [*STALE, "dataset"])
def test_a_stale_sidecar_is_refused(dataset: Path, sidecar: Path, tmp_path: Path, what: str) -> None:
    """Training and resumed encoding both refuse a stale sidecar; the error names the old and the new value."""
    changes, said = STALE.get(what, ({}, r"fingerprints\.|content"))
    if what == "dataset":
        changes = {"data.dataset": str(build_dataset(tmp_path / "other", {SMALL: [2]}))}
    if what == "captions":
        changes = {"data.dataset": changes["data.dataset"] | {"url": str(dataset)}}
    config = encoding(dataset, sidecar, changes)
    with pytest.raises(ConfigError, match=said):
        train(training(config, tmp_path / "out"))
    before = files_of(sidecar)
    with pytest.raises(ConfigError, match=said):
        encode(config)
    assert files_of(sidecar) == before


def test_settings_that_encoders_do_not_depend_on_may_change(dataset: Path, sidecar: Path, tmp_path: Path) -> None:
    """If a module names its `encoder_args`, one sidecar serves models of other sizes and other caption dropout."""
    model = ModelConfig(factory=ENCODERS, args={"draws": 0.5, "dim": 8, "dropout": 0.5})
    source = {"url": str(dataset), "captions": {"dropout": 0.5}}
    config = training(
        encoding(dataset, sidecar), tmp_path / "out", {"model": model, "data.dataset": source, "max_steps": 3}
    )
    assert train(config).step == 3


def test_other_weights_of_an_encoder_are_named_and_those_of_other_models_are_not(dataset: Path, tmp_path: Path) -> None:
    """A sidecar records the names and checksums of its encoders' weight files, and ignores those of trained models."""

    def weights(name: str, seed: int) -> str:
        path = tmp_path / f"{name}.safetensors"
        save_file({key: value + seed for key, value in getattr(build(), name).state_dict().items()}, path)
        return str(path)

    for paths in ({"vae": weights("vae", 1), "dit": weights("dit", 1)}, (weights("vae", 1), weights("dit", 1))):
        model = ModelConfig(factory=ENCODERS, weights=WeightsConfig(paths=paths))
        root = tmp_path / f"sidecar-{type(paths).__name__}"
        config = encoding(dataset, root, {"model": model, "data.features.num_visits": 1})
        weights("vae", 1)
        assert encode(config).is_sealed
        opened = open_sidecar(root)
        assert [row["name"] for row in opened.manifest.made_with["weights"]] == ["vae.safetensors"]
        weights("dit", 2)
        check_fresh(opened, model)
        check_fresh(opened, changed(model, {"weights.paths": {"dit": str(tmp_path / "dit.safetensors")}}))
        weights("vae", 2)
        with pytest.raises(ConfigError, match="weights are vae.safetensors with SHA-256"):
            check_fresh(opened, model)
        with pytest.raises(ConfigError, match="encoders_sha256"):
            encode(config)
        (tmp_path / "other.safetensors").write_bytes((tmp_path / "vae.safetensors").read_bytes())
        with pytest.raises(ConfigError, match="other.safetensors"):
            check_fresh(opened, changed(model, {"weights.paths": (str(tmp_path / "other.safetensors"),)}))
        shutil.rmtree(root)


def test_an_encoder_that_loads_itself_is_identified_by_its_tensors(
    dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An encoder loaded as by from_pretrained is identified by its tensors, not by its folder or the factory's name."""
    folder, moved = tmp_path / "models", tmp_path / "elsewhere" / "models"
    folder.mkdir()
    save_encoder(folder / "vae.safetensors")

    def model(name: str, where: Path) -> ModelConfig:
        return ModelConfig(factory=f"tests.trainer.encoders:{name}", args={"folder": str(where)})

    config = encoding(
        dataset, tmp_path / "sidecar", {"model": model("build_pretrained", folder), "data.features.num_visits": 1}
    )
    assert encode(config).is_sealed
    few = training(config, tmp_path / "out", {"max_steps": 2, "checkpoints.steps": 1})
    train(few)
    moved.parent.mkdir()
    folder.rename(moved)
    for name, steps in (("build_pretrained", 3), ("build_renamed", 4)):
        few = changed(few, {"model": model(name, moved), "max_steps": steps})
        assert train(few).step == steps, "the run was not resumed"
    assert encode(changed(config, {"model": few.model})).is_sealed
    caplog.clear()
    moved.rename(folder)  # the configured folder no longer exists
    assert train(changed(few, {"max_steps": 5})).step == 5
    assert "may be stale: their encoders cannot be built here" in caplog.text
    save_encoder(folder / "vae.safetensors", 1.5)
    few = changed(few, {"model": model("build_pretrained", folder), "output": tmp_path / "other"})
    for begin in (lambda: train(few), lambda: encode(changed(config, {"model": few.model}))):
        with pytest.raises(ConfigError, match=r"encoders_sha256.vae is \S+ in the features, but \S+ here"):
            begin()


def test_a_run_is_not_resumed_on_other_frozen_weights(dataset: Path, tmp_path: Path) -> None:
    """A run is not resumed if a frozen model's weights changed in a file of the same name."""
    path = tmp_path / "vae.safetensors"
    save_encoder(path)
    model = ModelConfig(factory="tests.trainer.encoders:build_pretrained", args={"folder": str(tmp_path)})
    config = config_of(dataset, tmp_path / "out", {"model": model, "max_steps": 1})
    train(config)
    save_encoder(path, 1.5)
    with pytest.raises(StateError, match=r"this run: the frozen weights of vae differ; use the checkpoint's"):
        train(changed(config, {"max_steps": 2}))


def test_impossible_encodings_are_refused_before_anything_is_written(dataset: Path, tmp_path: Path) -> None:
    root = tmp_path / "sidecar"
    with pytest.raises(ConfigError, match="has no `encode` method"):
        encode(encoding(dataset, root, {"model": ModelConfig(factory="tests.trainer.encoders:build_without_encode")}))
    with pytest.raises(ConfigError, match="lists 2 datasets"):
        encode(encoding(dataset, root, {"data.dataset": (str(dataset), str(dataset))}))
    assert not root.exists()
