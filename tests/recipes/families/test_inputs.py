"""Datasets with control videos and with audio, through the two commands of the tutorial, in one stage and in two."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from streamvid.trainer import train
from streamvid.trainer.config import TrainConfig
from streamvid.trainer.encode import encode
from tests.clips import encode as encode_clip
from tests.clips import frames_of
from tests.conftest import run_streamvid
from tests.recipes.test_fine_tuning import resolved
from tests.recipes.tiny import make_model
from tests.trainer.configs import changed
from tests.trainer.runs import losses_in
from tests.video.clips import run_ffmpeg

pytestmark = [pytest.mark.filterwarnings("ignore:In CPU autocast"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def with_control(folder: Path) -> tuple[str, ...]:
    """Videos with control videos, of which the last one is missing; the further options of the first command."""
    folder.mkdir()
    rows = []
    for number, name in enumerate(("bikes", "carphone_pristine", "bikes")):
        for kind, first in (("video", number), ("depth", number + 3)):
            clip = encode_clip(frames_of(name, 64, 64, 12 + first)[first:])
            (folder / f"{kind}-{number}.mp4").write_bytes(clip)
        depth = f"depth-{number}.mp4" if number < 2 else ""
        rows.append({"video": f"video-{number}.mp4", "caption": "a red bike", "depth": depth})
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return "--metadata", str(folder / "rows.csv"), "--media", "video:control?=depth", "--buckets", "64x64@5"


def with_audio(folder: Path) -> tuple[str, ...]:
    """Two videos with a tone and one without; the further options of the first command."""
    folder.mkdir()
    for number, rate in enumerate((440, 880, None)):
        file = folder / f"{number}.mp4"
        file.with_suffix(".txt").write_text("a red bike")
        pictures = ("-f", "lavfi", "-i", f"testsrc=s=64x64:r=24:d=1:decimals={number}")
        tone = () if rate is None else ("-f", "lavfi", "-i", f"sine=frequency={rate}:sample_rate=48000:duration=1")
        run_ffmpeg(*pictures, *tone, "-c:v", "libx264", "-pix_fmt", "yuv420p", file)
    return "--buckets", "64x64@9", "--fps", "24", "--fps-rule", "resample"


CASES = {"wan-vace": with_control, "ltx-2-audio": with_audio}
#: Layers that only train with these inputs, or that read them.
READERS = {"wan-vace": "vace_blocks.0.", "ltx-2-audio": "transformer_blocks.0.audio_attn1."}


@pytest.mark.parametrize("recipe", CASES)
def test_inputs_of_a_dataset_train_in_one_stage_and_in_two(
    recipe: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = CASES[recipe](tmp_path / "videos")
    run_streamvid("shard", tmp_path / "videos", tmp_path / "ds", *options, "--workers", "1")
    model = make_model(recipe, tmp_path / "model")
    words = ("--recipe", recipe, "--model", model, "--dataset", tmp_path / "ds", "--output", tmp_path / "one", "--lora")
    sets = ("max_steps=1", "data.num_workers=0", "eval.steps=null", "data.loader.preset=null", "data.batch_size=3")
    config = resolved(*words, *(part for one in (*sets, "logging.steps=1") for part in ("--set", one)))
    one = replace(config, accelerate=replace(config.accelerate, cpu=True))
    train(one)
    assert "trains as text to video" not in caplog.text
    (file,) = one.output.glob("*.safetensors")
    assert any(
        READERS[recipe] in name and "lora_B" in name and tensor.any() for name, tensor in load_file(file).items()
    )
    features = {"data.features.url": str(tmp_path / "features")}
    encode(changed(one, {**features, "task": "sft:data_process", "output": tmp_path / "encoding"}))
    two = changed(one, {**features, "task": "sft:train", "output": tmp_path / "two"})
    train(two)
    assert losses_in(two.output) == losses_in(one.output) and len(losses_in(one.output)) == 1
    assert weights(one) == weights(two)


def weights(config: TrainConfig) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in config.output.glob("*.safetensors")}
