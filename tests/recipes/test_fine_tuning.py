"""Tests of fine-tuning by recipe: from videos to files that diffusers loads, and the checks before a run."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import yaml
from click.testing import CliRunner
from torch import Tensor

import streamvid
from streamvid.cli.main import cli
from streamvid.cli.verbs.train import command, request_of
from streamvid.errors import ConfigError
from streamvid.loader.batch.batch import Batch
from streamvid.modules.export import export_adapters, write_pipeline_folder
from streamvid.plan.cost import CostTable
from streamvid.trainer import train
from streamvid.trainer.config import TrainConfig
from streamvid.trainer.preflight.check import check
from streamvid.trainer.preflight.profile import profile
from streamvid.video.encode.showing import png
from tests.clips import encode, frames_of
from tests.conftest import run_streamvid
from tests.recipes.tiny import make_model


@dataclass(frozen=True)
class Place:
    """A tiny model, its dataset, and the output folder of a run."""

    model: Path
    dataset: Path
    run: Path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The result of the tutorial's first command: two buckets with different token counts, for clips and for images."""
    root = tmp_path_factory.mktemp("recipe")
    videos = root / "videos"
    videos.mkdir()
    for name in ("one", "two", "three", "four"):
        (videos / f"{name}.mp4").write_bytes(encode(frames_of("bikes", 64, 64, 12)))
        (videos / f"{name}.txt").write_text("a red bike")
    for name in ("still", "other", "third"):
        (videos / f"{name}.png").write_bytes(png(next(iter(frames_of("bikes", 64, 64, 1)))))
    found = Place(make_model("wan2.1", root / "model"), root / "ds", root / "run")
    buckets = ("--buckets", "64x64@5,64x64@1", "--fps", "16", "--fps-rule", "resample")
    run_streamvid("shard", videos, found.dataset, *buckets, "--workers", "1")
    return found


@pytest.fixture(scope="module")
def run(place: Place) -> Path:
    """The output of a run of the tutorial's second command."""
    options = (
        "max_steps=2",
        "data.num_workers=0",
        "eval.split=train",
        "eval.steps=2",
        "eval.num_batches=1",
        "eval.sample_steps=2",
    )
    more = (
        "eval.prompts=[a blue car, a cat]",
        "model.args.sample_steps=2",
        "model.args.validation_times=[0.1, 0.9]",
        "optimizer.ema_decay=0.9",
        "optimizer.lr=0.1",
    )
    words = ("train", "--recipe", "wan2.1", "--model", place.model, "--dataset", place.dataset, "--output", place.run)
    sets = [part for text in (*options, *more) for part in ("--set", text)]
    # Run in this process, because a new one would import torch and diffusers again.
    result = CliRunner().invoke(cli, [*map(str, words), "--lora", *sets], catch_exceptions=False)
    assert result.exit_code == 0 and "step 2: loss" in result.output
    return place.run


def resolved(*arguments: object) -> TrainConfig:
    """Return the configuration of the run that a command line describes."""
    with click.Context(command) as context:
        given = dict(command.make_context("train", [str(one) for one in arguments], parent=context).params)
    parts = [given.pop(name) for name in ("config", "overrides", "factory", "trackers")]
    return request_of(*parts, given).resolve(lambda source, options: source)


def of(place: Place, *more: object, kind: str = "--lora", output: Path | None = None) -> TrainConfig:
    options = ("--model", place.model, "--dataset", place.dataset, "--output", output or place.run)
    kinds = (kind,) if kind else ()
    config = resolved("--recipe", "wan2.1", *options, *kinds, "--set", "data.num_workers=0", *more)
    return replace(config, accelerate=replace(config.accelerate, cpu=True))


def rendered(pipe: Any) -> Tensor:
    """Render a video with a fixed seed."""
    texts = torch.ones(1, 8, 16)
    settings = {"height": 64, "width": 64, "num_frames": 5, "num_inference_steps": 2, "output_type": "pt"}
    pipe.set_progress_bar_config(disable=True)
    seed = torch.Generator().manual_seed(0)
    found: Tensor = pipe(prompt_embeds=texts, negative_prompt_embeds=texts, generator=seed, **settings).frames
    return found


def test_two_commands_leave_adapters_samples_and_held_out_losses(run: Path) -> None:
    names = {path.name for path in run.iterdir()}
    assert {"step-2.safetensors", "step-2.ema.safetensors", "config.yaml", "metrics.jsonl"} <= names
    samples = {path.name for path in (run / "samples").iterdir()}
    assert samples == {f"step-2{mean}.{kind}" for mean in ("", ".ema") for kind in ("png", "mp4")}
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["eval_loss_of_bucket"] and {f"eval_loss_at_{time}" for time in (0.1, 0.9)} <= line.keys()


@pytest.mark.parametrize("format", ["diffusers", "comfyui", "kohya"])
def test_the_pipeline_loads_the_adapters_of_the_run_and_their_exports(
    place: Place, run: Path, tmp_path: Path, format: Any
) -> None:
    """The adapters change the video, and do so equally in each format that diffusers reads."""
    from diffusers import WanPipeline

    before = rendered(WanPipeline.from_pretrained(place.model))
    pipe = WanPipeline.from_pretrained(place.model)
    pipe.load_lora_weights(str(run), weight_name="step-2.safetensors")
    trained = rendered(pipe)
    export_adapters(run / "step-2.safetensors", format, tmp_path / "lora.safetensors")
    other = WanPipeline.from_pretrained(place.model)
    other.load_lora_weights(str(tmp_path), weight_name="lora.safetensors")
    assert torch.allclose(rendered(other), trained, atol=1e-4)
    assert not torch.allclose(before, trained, atol=1e-4)


@pytest.mark.parametrize(
    ("source", "format", "target", "said"),
    [
        ("prompts.txt", "comfyui", "y.safetensors", "is not a weight file; allowed: safetensors files, and state"),
        ("model", "comfyui", "y.safetensors", "is a diffusers folder, not the output folder of a run"),
        ("run", "peft", "x.safetensors", "--format peft writes a folder; use a name without .safetensors"),
    ],
)
def test_exports_of_anything_else_are_refused(
    place: Place, run: Path, tmp_path: Path, source: str, format: str, target: str, said: str
) -> None:
    (tmp_path / "prompts.txt").write_text("a red bike\na cat\n")
    path = {"model": place.model, "run": run}.get(source, tmp_path / source)
    result = run_streamvid("export", path, "--format", format, "-o", tmp_path / target, check=False)
    assert result.returncode != 0 and said in " ".join(result.stderr.split())
    assert not (tmp_path / target).exists()


def test_a_dataset_without_held_out_clips_trains_without_evaluation(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = of(place, "--set", "max_steps=1", output=tmp_path / "run")
    train(config)
    assert "evaluation is disabled, because no dataset has a 'val' split; shard with --val-fraction" in caplog.text
    with pytest.raises(ConfigError, match=r"--set eval\.steps=null --set eval\.sample_steps=null"):
        train(of(place, "--set", "eval.sample_steps=1", output=tmp_path / "samples"))


def test_full_weights_become_a_folder_that_loads(place: Place, tmp_path: Path) -> None:
    from diffusers import WanPipeline

    config = of(place, "--set", "max_steps=1", "--set", "eval.steps=null", kind="", output=tmp_path / "run")
    assert (config.optimizer.lr, config.model.trainable) == (1e-5, ("transformer",))
    train(config)
    changed = write_pipeline_folder([tmp_path / "run/step-1.safetensors"], place.model, tmp_path / "mine")
    assert changed == ("transformer",)
    theirs, base = (WanPipeline.from_pretrained(one) for one in (tmp_path / "mine", place.model))
    assert not torch.equal(theirs.transformer.proj_out.weight, base.transformer.proj_out.weight)
    assert torch.equal(theirs.vae.decoder.conv_in.weight, base.vae.decoder.conv_in.weight)
    with pytest.raises(ConfigError, match="already exists"):
        write_pipeline_folder([tmp_path / "run/step-1.safetensors"], place.model, tmp_path / "mine")


def test_every_setting_of_a_recipe_can_be_overridden(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"optimizer": {"lr": 3e-4}, "model": {"lora": {"rank": 4}}}))
    config = of(place, "--config", file, "--set", "data.max_tokens_per_batch=100", "--lora_target_modules", "to_q")
    assert (config.optimizer.lr, config.model.lora.rank) == (3e-4, 4)
    assert (config.data.batch_size, config.data.max_tokens_per_batch) == (None, 100)
    assert config.model.lora.target_modules == ("to_q",) and config.model.lora.base_model == "transformer"
    assert resolved("--model", place.model, "--dataset", "ds", "--output", "o").model.factory == config.model.factory


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--recipe", "wan21"), "did you mean 'wan2.1'"),
        (("--recipe", "sdxl"), "allowed: .*wan2.1"),
        (
            ("--recipe", "mochi", "--model", "{model}"),
            "is a WanPipeline, which recipe 'mochi' does not train; use --recipe wan2.1",
        ),
        (
            ("--model", "{model}/.."),
            "is not a folder with model_index.json; .*--set model.args.download=true and --recipe",
        ),
        (("--recipe", "wan2.1"), "a recipe needs --model FOLDER; add it"),
    ],
)
def test_mistakes_name_the_remedy(place: Place, arguments: tuple[str, ...], said: str) -> None:
    words = [one.format(model=place.model) for one in arguments]
    with pytest.raises(ConfigError, match=said):
        resolved(*words, "--dataset", "ds", "--output", "o")


def test_a_recipe_without_its_places_names_their_flags(place: Place) -> None:
    with pytest.raises(ConfigError, match="a recipe needs --dataset URL and --output FOLDER; add them"):
        resolved("--model", place.model, "--lora")
    sets = ("--set", "data={dataset: ds}", "--set", "output=o")
    assert resolved("--model", place.model, *sets).data.dataset == "ds"
    with pytest.raises(click.UsageError, match="add --model FOLDER or --recipe NAME"):
        resolved("--lora")


def test_unused_prompts_are_reported(place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    more = ("max_steps=1", "eval.prompts=[a cat]")
    train(of(place, *(part for one in more for part in ("--set", one)), output=tmp_path / "run"))
    assert "eval.prompts is set, but eval.sample_steps is null" in caplog.text


def test_a_check_counts_memory_and_names_what_would_fit(place: Place) -> None:
    config = of(place)
    report = check(config)
    assert not report.problems and report.step_seconds and report.epoch_seconds
    large, small = report.buckets
    assert (large.tokens, small.tokens) == (32, 16)
    assert large.activation_bytes > small.activation_bytes > 0
    assert large.checkpointed_bytes < large.activation_bytes
    fixed = report.fixed
    assert fixed.optimizer == 2 * fixed.gradients and 0 < fixed.encoders < fixed.weights
    assert large.needed_bytes > large.encode_bytes > small.encode_bytes > 0
    few = check(config, device_bytes=large.needed_bytes - 1)
    assert len(few.problems) == 1 and any("--task sft:data_process" in text for text in few.advice)


def test_a_dataset_that_breaks_the_rule_of_the_model_is_refused(place: Place) -> None:
    with pytest.raises(ConfigError, match="ltx"):
        check(of(place, "--set", "data.loader.preset=ltx"))


def test_a_profile_is_the_cost_table_that_training_reads(place: Place, tmp_path: Path) -> None:
    config = of(place, output=tmp_path / "run")
    found = profile(config)
    assert {name for name, _ in found.seconds} == {"64x64-5f", "64x64-1f"}
    found.write(tmp_path / "costs.json")
    assert CostTable.from_json(json.loads((tmp_path / "costs.json").read_text())) == found.costs
    costs = ("--set", f"data.loader.schedule.costs={tmp_path / 'costs.json'}", "--set", "data.loader.sync=cost")
    result = train(of(place, *costs, "--set", "max_steps=2", "--set", "eval.steps=null", output=tmp_path / "run"))
    assert result.step == 2


def test_uneven_batches_of_images_and_videos_weigh_every_sample_alike(place: Place) -> None:
    """PLAN-3 with a recipe: two ranks, batches limited by tokens, and buckets of equal cost in one step."""
    from streamvid.modules.build import build_module
    from streamvid.trainer.tasks import TaskModule, find_task

    config = of(place)
    module = TaskModule(build_module(config.model, task="sft", seed=0), find_task("sft"))
    options: dict[str, Any] = {"preset": "wan2.1-480p", "sync": "cost", "tail": "pad", "num_workers": 0}
    ranks = []
    for rank in range(2):
        world = streamvid.World(rank, 2)
        with streamvid.VideoLoader(place.dataset, max_tokens_per_batch=32, world=world, **options) as loader:
            ranks.append([batch.clone() for batch in loader])
    weights = {batch.loss_weight for batches in ranks for batch in batches}
    assert len(weights) > 1 and len({batch.bucket.id for batches in ranks for batch in batches}) == 2
    for step in zip(*ranks, strict=True):
        with torch.no_grad():
            weighted = sum(float(module(batch)["loss"].mean()) * batch.loss_weight for batch in step) / 2
            alone = [float(module(one)["loss"]) for batch in step for one in single(batch)]
        assert weighted == pytest.approx(sum(alone) / len(alone), rel=1e-4)


def single(batch: Batch) -> list[Batch]:
    """Split a batch into batches of one sample."""
    found = []
    for row in range(len(batch.sample_keys)):
        rows = batch.map_tensors(lambda tensor, row=row: tensor[row : row + 1])  # type: ignore[misc]
        lists = {name: [value[row]] for name, value in rows.items() if isinstance(value, list)}
        found.append(rows.with_fields(lists))
    return found
