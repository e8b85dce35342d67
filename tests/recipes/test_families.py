"""Tests of the recipes with tiny random models of the published classes: encode, train, sample, save and load."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from streamvid.buckets.presets import preset_names
from streamvid.errors import ConfigError
from streamvid.loader.batch.batch import Batch
from streamvid.modules.build import build_module
from streamvid.modules.config import LoraConfig, ModelConfig
from streamvid.modules.encoding import with_encoded
from streamvid.modules.factory import import_object
from streamvid.recipes.registry import RECIPES, find_recipe
from tests.recipes.small_batches import add_audio, add_media, make_batch
from tests.recipes.test_losses_of_families import built, recipe_of
from tests.recipes.tiny import MODELS, WITH_INPUTS, make_model

# Frames, height and width of two buckets that the family accepts, one of which is an image.
SIZES = {
    "ltx-video": [(9, 64, 96), (1, 64, 64)],
    "ltx-2": [(9, 64, 96), (1, 64, 64)],
    "ltx-2-audio": [(9, 64, 96), (1, 64, 64)],
    "mochi": [(7, 32, 48), (1, 32, 32)],
}
# This model is given the first frame, so for an image nothing remains to be predicted.
SIZES["hunyuanvideo-replace-i2v"] = [(5, 32, 48), (9, 32, 32)]
USUAL = [(5, 32, 48), (1, 32, 32)]
SIZES |= {name: [(9, 32, 48), (1, 32, 32)] for name in (*MODELS, *WITH_INPUTS) if name.startswith("cogvideox")}
# The family that is tested by default; all families together would be slow.
QUICK = ("wan2.1",)
EVERY = (*MODELS, *WITH_INPUTS)
ALL = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in EVERY]

pytestmark = [
    pytest.mark.filterwarnings("ignore:In CPU autocast"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def encoded(name: str, module: Any, size: tuple[int, int, int], text: tuple[str, ...] = ("a red bike", "")) -> Batch:
    """Return a batch with the encodings of the recipe; of their inputs, only the video is kept."""
    batch = make_batch(size, text)
    if name in ("cogvideox-fun", "wan-vace"):
        batch = add_media(batch, control=make_batch(size, text, seed=1).video)
    if name == "ltx-2-audio":  # neither the second clip nor any image has audio
        batch = add_audio(batch, tuple(row != 1 and size[0] > 1 for row in range(len(text))))
    ready = with_encoded(batch, module.encode(batch))
    inputs = ("media", "media_present", "audio", "audio_present")
    return Batch({field: value for field, value in ready.items() if field not in inputs})


def without_pixels(batch: Batch) -> Batch:
    return Batch({name: value for name, value in batch.items() if name not in ("video", "layout")})


@pytest.mark.parametrize("name", ALL)
def test_videos_and_images_are_encoded_trained_on_and_sampled(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = built(name, tmp_path, sample_steps=2, guidance=2.0)
    split = built(name, tmp_path, "sft:train", sample_steps=2, guidance=2.0)
    assert {part for part, _ in split.named_children()} == set(split.denoiser_names())
    for size in SIZES.get(name, USUAL):
        ready = encoded(name, module, size)
        loss = module(ready)["loss"]
        assert loss.shape == (2,) and loss.dtype == torch.float32 and bool(loss.isfinite().all())
        held_out = module.validate(ready)
        assert held_out["loss"].shape == (2,) and torch.equal(held_out["loss"], module.validate(ready)["loss"])
        stored = without_pixels(ready)
        assert torch.equal(split(stored)["loss"], loss)
        with caplog.at_level(logging.INFO):
            made = module.sample(ready)
        assert f"rendered sample 2 of 2 in bucket {ready.bucket.id}" in caplog.text
        assert made.shape == (2, 3, *size) and made.dtype == torch.uint8
        assert torch.equal(split.sample(stored), made)
    null = module.encode_null()
    for field, value in null.items():
        row = ready[field][1]
        assert torch.equal(row[: len(value)] if value.ndim else row, value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("cogvideox", "ltx-video") else pytest.mark.slow) for name in EVERY],
)
def test_samples_are_rendered_with_the_default_precision_of_encoders(name: str, dtype: str, tmp_path: Path) -> None:
    """Text encoders use bfloat16, the VAE float32, and the transformer the dtype of full training or of adapters on a
    GPU."""
    size = SIZES.get(name, USUAL)[-1]
    model = str(make_model(name, tmp_path / name))
    build = import_object(RECIPES[recipe_of(name)].factory)
    module = build(task="sft", model=model, dtype=dtype, sample_steps=2)
    made = module.sample(encoded(name, module, size, ("a red bike",)))
    assert made.shape == (1, 3, *size) and made.dtype == torch.uint8


@pytest.mark.parametrize("name", ALL)
def test_a_sample_has_the_same_loss_in_any_batch(name: str, tmp_path: Path) -> None:
    module = built(name, tmp_path)
    whole = encoded(name, module, SIZES.get(name, USUAL)[0], ("a red bike", "a blue car at night", ""))
    losses = module(whole)["loss"]
    for row in range(3):
        cut = {
            field: value[row : row + 1]
            for field, value in whole.items()
            if field not in ("bucket", "layout", "loss_weight")
        }
        assert torch.allclose(module(whole.with_fields(cut))["loss"], losses[row : row + 1], rtol=1e-5)


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("name", ALL)
def test_two_clips_are_learned_by_heart(name: str, kind: str, tmp_path: Path) -> None:
    """The loss on two clips with fixed noise and times falls below 30 % of its start; frozen weights do not change.

    Adapters have the recipe's layers. Wan and Mochi also need one on the output layer: in these tiny models, it makes
    48 or 64 values from 24 or 32 channels, so if it is frozen, no earlier layer can produce arbitrary noise.
    """
    recipe = find_recipe(recipe_of(name))
    args = {"model": str(make_model(name, tmp_path / name)), "encoder_dtype": "float32"}
    targets = (*recipe.lora_targets, *(("proj_out",) if name.startswith(("wan", "mochi")) else ()))
    lora = LoraConfig(base_model=recipe.base_model, rank=16, target_modules=targets)
    model = ModelConfig(factory=recipe.factory, args=args, lora=lora if kind == "lora" else LoraConfig())
    module: Any = build_module(model, task="sft", seed=0)
    trained = {part: value for part, value in module.named_parameters() if value.requires_grad}
    frozen = {part: value.clone() for part, value in module.named_parameters() if not value.requires_grad}
    assert all(part.startswith(f"{recipe.base_model}.") for part in trained)
    assert (kind == "lora") == all(".lora_" in part for part in trained)
    ready = encoded(name, module, SIZES.get(name, USUAL)[0])
    before = after = float(module(ready)["loss"].mean().detach())
    optimizer = torch.optim.Adam(trained.values(), lr=1e-2 if kind == "full" else 2e-2)
    for _ in range(600):
        loss = module(ready)["loss"].mean()
        after = float(loss.detach())
        if after < 0.3 * before:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert after < 0.3 * before
    without = {part for part, value in trained.items() if value.grad is None}
    unused = {part for part in trained if module.is_unused(part)}
    assert without == (set() if name == "ltx-2-audio" else unused)  # one clip in this batch has audio
    assert module.has_unused_parameters == bool(unused)
    assert all(torch.equal(dict(module.named_parameters())[part], value) for part, value in frozen.items())


@pytest.mark.slow
def test_first_frames_come_from_a_conditioning_input_if_it_is_named(tmp_path: Path) -> None:
    """An image-to-video model is conditioned on the named input in `media`, or by default on the clip's first frame."""
    own, other = built("wan2.1-i2v", tmp_path), built("wan2.1-i2v", tmp_path, image="photo")
    batch = make_batch((5, 32, 48))
    photos = batch.video[:, :, 2:3].contiguous()
    with_photos = batch.with_fields({"media": {"photo": photos}})
    found, usual = other.encode(with_photos), own.encode(with_photos)
    assert torch.equal(found["first_frame"], photos[:, :, 0])
    assert torch.equal(usual["first_frame"], batch.video[:, :, 0])
    assert torch.equal(found["latents"], usual["latents"])
    for name in ("condition", "image_embeds"):
        assert not torch.allclose(found[name], usual[name])
    with pytest.raises(ConfigError, match="image is 'photo', but the batch has no such conditioning input"):
        other.encode(batch)


def test_a_folder_of_another_family_is_refused(tmp_path: Path) -> None:
    model = make_model("wan2.1", tmp_path / "wan")
    index = json.loads((model / "model_index.json").read_text())
    for change, named in (
        ({"_class_name": "MochiPipeline"}, "_class_name is MochiPipeline"),
        ({"transformer": ["diffusers", "AutoencoderKL"]}, "transformer is AutoencoderKL"),
        ({"scheduler": ["os", "system"]}, "scheduler is system"),
    ):
        (model / "model_index.json").write_text(json.dumps({**index, **change}))
        with pytest.raises(ConfigError, match=named):
            built_again(model)
    (model / "model_index.json").write_text(json.dumps(index))
    (model / "vae").rename(tmp_path / "vae")
    with pytest.raises(
        ConfigError, match=r"has no vae folder, but model_index\.json lists this component as .*AutoencoderKLWan"
    ):
        built_again(model)
    with pytest.raises(ConfigError, match=r"model_index\.json does not exist.*--set model\.args\.download=true"):
        built_again(tmp_path)


def test_settings_and_sizes_that_do_not_fit_are_named(tmp_path: Path) -> None:
    model = make_model("wan2.1", tmp_path / "wan")
    with pytest.raises(ConfigError, match="first_frame is 0.5"):
        built_again(model, first_frame=0.5)
    with pytest.raises(ConfigError, match="no field 'shift'; did you mean 'time_shift'"):
        built_again(model, shift=3)
    with pytest.raises(ConfigError, match="validation_times"):
        built_again(model, validation_times=[0.5, 1.0])
    module = built_again(model)
    for size in ((6, 32, 48), (5, 24, 48)):
        with pytest.raises(ConfigError, match="4·k \\+ 1 frames and sides that are multiples of 16"):
            module.encode(make_batch(size))
    with pytest.raises(ConfigError, match="allowed: .*wan2.1"):
        find_recipe("wan3")


def built_again(model: Path, **settings: Any) -> Any:
    from streamvid.recipes.families.wan import build

    return build(model=str(model), encoder_dtype="float32", **settings)


def test_every_recipe_has_presets_and_a_tiny_model() -> None:
    assert {recipe_of(name) for name in (*MODELS, *WITH_INPUTS)} == set(RECIPES)
    for recipe in RECIPES.values():
        assert set(recipe.presets) <= set(preset_names())
