"""Tests of every recipe on two ranks: runs are killed and resumed, use stored features, and load into pipelines."""

from __future__ import annotations

import inspect
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from streamvid.buckets.bucket import Bucket
from streamvid.trainer.config import TrainConfig
from streamvid.trainer.encode import encode
from tests.conftest import run_streamvid
from tests.loader.conftest import build_dataset
from tests.recipes.families.datasets import with_audio, with_control
from tests.recipes.test_families import SIZES, USUAL
from tests.recipes.test_fine_tuning import resolved
from tests.recipes.tiny import MODELS, WITH_INPUTS, make_model
from tests.trainer.configs import changed
from tests.trainer.runs import last_step_in, metrics_in, run, start

# These imports take longer than a run, so they happen once, in the process from which the runs are forked.
PRELOAD = ("diffusers.pipelines.wan.pipeline_wan", "diffusers.pipelines.ltx2.pipeline_ltx2", "peft")
RANKS, STEPS, RANK, ALPHA = 2, 6, 4, 8
# The case that runs by default; all cases together would be slow.
QUICK = [("wan2.1", "lora")]
CASES = [(name, kind) for name in (*MODELS, *WITH_INPUTS) for kind in ("full", "lora")]
# Datasets with more than clips and captions. The one for VACE has samples with and without a control video.
DATASETS: dict[str, Callable[..., Path]] = {
    "wan-vace": partial(with_control, is_optional=True),
    "ltx-2-audio": with_audio,
    "cogvideox-fun": with_control,
}
# Pipelines of diffusers 0.42.1 without load_lora_weights. Their transformers load the same files.
WITHOUT_LORA_LOADER = ("hunyuanvideo1.5", "hunyuanvideo1.5-i2v")
# Wan 2.2 A14B trains its high-noise expert by default.
EXPERTS = {"both": ("--set", "model.args.expert=both"), "low-lora": ("--set", "model.args.expert=low", "--lora")}
CASES += [("wan2.2", kind) for kind in EXPERTS]

pytestmark = [
    pytest.mark.filterwarnings("ignore:In CPU autocast"),
    pytest.mark.timeout(900),
]


@dataclass(frozen=True)
class Case:
    """A completed run on two ranks. whole: its configuration."""

    name: str
    kind: str
    model: Path
    whole: TrainConfig

    @property
    def is_lora(self) -> bool:
        return self.kind.endswith("lora")

    @property
    def output(self) -> Path:
        return self.whole.output

    @property
    def weights(self) -> dict[str, bytes]:
        return weights_in(self.output)


def weights_in(output: Path) -> dict[str, bytes]:
    """Return the weight files and their moving averages for every saved step."""
    return {path.name: path.read_bytes() for path in output.glob("*.safetensors")}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def once(folder: Path, make: Callable[[Path], Any]) -> Path:
    """Make the folder on first use, and return it."""
    if not folder.exists():
        make(folder)
    return folder


@pytest.fixture(
    scope="module",
    params=[pytest.param(case, id="-".join(case), marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def case(request: pytest.FixtureRequest, root: Path) -> Case:
    """A run with the recipe's own options, over buckets of videos and of images, with samples after the last step."""
    name, kind = request.param
    torch.set_num_threads(1)
    sizes = SIZES.get(name, USUAL)
    dataset = dataset_of(name, root, sizes)
    model = once(root / name / "model", lambda folder: make_model(name, folder))
    sets = {
        "max_steps": STEPS,
        "data.num_workers": 0,
        "data.loader.preset": "null",  # these clips do not have the frame rate that presets require
        "model.args.sample_steps": 2,
        "optimizer.lr": 0.02 if kind.endswith("lora") else 0.002,
        "optimizer.ema_decay": 0.5,
        "eval.split": "train",
        "eval.steps": 3,
        "eval.num_batches": 1,
        "eval.sample_steps": STEPS,
        "checkpoints.steps": 2,
        "logging.steps": 1,
        "accelerate.cpu": "true",
    }
    if kind.endswith("lora"):
        sets |= {"model.lora.rank": RANK, "model.lora.alpha": ALPHA}
    words = [part for option, value in sets.items() for part in ("--set", f"{option}={value}")]
    places = ("--model", model, "--dataset", dataset, "--output", root / name / kind)
    kinds = ("--lora",) if kind == "lora" else EXPERTS.get(kind, ())
    if name in WITH_INPUTS:  # the pipeline's class alone does not select audio
        kinds += ("--recipe", name)
    whole = resolved(*places, *kinds, *words)
    run(whole, RANKS, PRELOAD)
    return Case(name, kind, model, whole)


def dataset_of(name: str, root: Path, sizes: list[tuple[int, int, int]]) -> Path:
    """Make a dataset of eight samples per bucket size, with the inputs of the recipe."""
    if name in DATASETS:
        videos = once(root / name / "videos", lambda folder: DATASETS[name](folder, sizes, 8))
        return videos.with_name("ds")
    layout = {Bucket(*size): [4, 4] for size in sizes}
    return once(root / f"ds{sizes}".replace(" ", ""), lambda folder: build_dataset(folder, layout))


def test_a_run_that_was_killed_and_resumed_ends_with_the_same_bytes(case: Case) -> None:
    """PLAN-5 with encoding during training: all saved weights, moving averages, and losses are equal."""
    parts = changed(case.whole, {"output": case.output.with_name(f"{case.kind}-parts")})
    process = start(parts, RANKS, PRELOAD)
    while process.is_alive() and last_step_in(parts.output) < 3:
        time.sleep(0.001)
    process.send(signal.SIGKILL)
    assert process.wait() == [-signal.SIGKILL] * RANKS
    assert not any(name.startswith(f"step-{STEPS}.") for name in weights_in(parts.output))
    run(parts, RANKS, PRELOAD)
    assert weights_in(parts.output) == case.weights
    assert figures_in(parts.output) == figures_in(case.output)
    shutil.rmtree(parts.output)


def test_training_on_stored_features_equals_one_stage(case: Case, root: Path) -> None:
    stored = {"data.features.url": str(root / case.name / "features")}
    first = changed(case.whole, {**stored, "task": "sft:data_process", "output": root / case.name / "encoding"})
    once(root / case.name / "features", lambda _: encode(first))
    second = {**stored, "task": "sft:train", "output": case.output.with_name(f"{case.kind}-split")}
    split = changed(case.whole, {**second, "eval.sample_steps": None})
    run(split, RANKS, PRELOAD)
    assert weights_in(split.output) == case.weights
    assert figures_in(split.output) == figures_in(case.output)
    shutil.rmtree(split.output)


def test_samples_are_rendered_with_the_weights_and_with_their_averages(case: Case) -> None:
    folder = case.output / "samples"
    names = {f"step-{STEPS}{mean}.{kind}" for mean in ("", ".ema") for kind in ("png", "mp4")}
    assert {path.name for path in folder.iterdir()} == names
    sheets = [(folder / f"step-{STEPS}{mean}.png").read_bytes() for mean in ("", ".ema")]
    assert sheets[0] != sheets[1]


def test_the_pipeline_with_the_result_renders_like_the_trained_weights(case: Case, tmp_path: Path) -> None:
    """Adapters have the same effect as if merged into the weights; full weights load as a folder."""
    base, merged = opened(case.model), opened(case.model)
    if case.is_lora:
        file = case.output / f"step-{STEPS}.safetensors"
        trained = opened(case.model)
        load_adapters(trained, file, case)
        merge(merged.transformer_2 if case.kind == "low-lora" else merged.transformer, load_file(file))
    else:
        run_streamvid("export", case.output, "--format", "diffusers", "-o", tmp_path / "mine")
        trained = opened(tmp_path / "mine")
        for file in case.output.glob(f"step-{STEPS}*.safetensors"):
            if ".ema" not in file.suffixes:
                replace_weights(merged, load_file(file))
    of_pipes = (rendered(pipe, case.name) for pipe in (base, merged, trained))
    for before, expected, found in zip(*of_pipes, strict=True):
        assert torch.allclose(found, expected, atol=1e-4)
        assert float((found - before).abs().max()) > 1e-2


def figures_in(output: Path) -> list[dict[str, Any]]:
    """Return the losses of steps and evaluations."""
    lines = metrics_in(output)
    return [{name: value for name, value in line.items() if "loss" in name or name == "step"} for line in lines]


def opened(folder: Path) -> Any:
    """Load the pipeline in a folder as a user does."""
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def load_adapters(pipe: Any, file: Path, case: Case) -> None:
    assert hasattr(pipe, "load_lora_weights") == (case.name not in WITHOUT_LORA_LOADER)
    if case.kind == "low-lora":
        pipe.load_lora_weights(str(file.parent), weight_name=file.name, load_into_transformer_2=True)
    elif case.name not in WITHOUT_LORA_LOADER:
        pipe.load_lora_weights(str(file.parent), weight_name=file.name)
    else:
        pipe.transformer.load_lora_adapter(str(file.parent), weight_name=file.name, prefix="transformer")


def replace_weights(pipe: Any, weights: dict[str, Tensor]) -> None:
    for name, tensor in weights.items():
        child, _, own = name.partition(".")
        getattr(pipe, child).get_parameter(own).data.copy_(tensor)


def merge(transformer: Any, adapters: dict[str, Tensor]) -> None:
    """Add alpha / rank · B · A to each weight."""
    layers = {name.removeprefix("transformer.").rpartition(".lora_")[0] for name in adapters}
    assert layers
    for layer in layers:
        up, down = (adapters[f"transformer.{layer}.lora_{half}.weight"] for half in "BA")
        transformer.get_submodule(layer).weight.data += ALPHA / RANK * (up @ down)


def rendered(pipe: Any, name: str) -> list[Tensor]:
    """Render a video with a fixed seed and, if the recipe trains it, audio."""
    frames, height, width = SIZES.get(name, USUAL)[0]
    settings: dict[str, Any] = {"num_frames": frames, "height": height, "width": width, "num_inference_steps": 2}
    taken = inspect.signature(pipe.__call__).parameters
    red = Image.new("RGB", (width, height), "red")
    # A first frame, or a control video under its name in VACE or CogVideoX-Fun.
    settings |= {"image": red, "control_video": [red] * frames}
    if name == "wan-vace":
        settings["video"] = [red] * frames
    if "height" not in taken:  # an image-to-video pipeline that chooses a size of about this side length
        pipe.target_size = height
    settings = {one: value for one, value in settings.items() if one in taken}
    if name.startswith("wan"):  # Wan needs ftfy to encode prompts
        settings |= {one: torch.ones(1, 8, 16) for one in ("prompt_embeds", "negative_prompt_embeds")}
    else:
        settings["prompt"] = "a red bike"
    if name.startswith("cogvideox"):
        settings["max_sequence_length"] = pipe.transformer.config.max_text_seq_length
    made = pipe(generator=torch.Generator().manual_seed(0), output_type="pt", **settings)
    return [made.frames, made.audio] if name == "ltx-2-audio" else [made.frames]
