"""Tests of conditioning inputs in the recipes: their encodings equal those of the pipelines for the same pixels."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from streamvid.errors import ConfigError
from streamvid.loader.batch.batch import Batch
from streamvid.modules.encoding import with_encoded
from tests.recipes.small_batches import add_media, make_batch
from tests.recipes.test_losses_of_families import built

SIZE = (5, 32, 48)


def with_media(**media: Tensor) -> Batch:
    return add_media(make_batch(SIZE, ("a red bike",)), **media)


def pixels(*shape: int, seed: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def mask_of(boxes: int) -> Tensor:
    """Return a one-channel mask of white boxes that move over black."""
    mask = torch.zeros(1, 1, *SIZE, dtype=torch.uint8)
    for frame in range(SIZE[0]):
        mask[:, :, frame, 4 : 4 + boxes, 5 + frame : 21 + frame] = 255
    return mask


def images(video: Tensor) -> list[Any]:
    """Return the frames of a video or mask in the form that the pipelines accept."""
    return [Image.fromarray(one.numpy()) for one in video[0].expand(3, -1, -1, -1).permute(1, 2, 3, 0)]


@pytest.mark.parametrize(
    "names", [("control",), ("control", "mask"), ("control", "mask", "reference"), ("reference",), ("mask",)]
)
def test_the_inputs_of_vace_equal_those_of_its_pipeline(names: tuple[str, ...], tmp_path: Path) -> None:
    module = built("wan-vace", tmp_path, vae_dtype="float32")
    media = {
        "control": pixels(1, 3, *SIZE, seed=1),
        "mask": mask_of(16),
        "reference": pixels(1, 3, 1, *SIZE[1:], seed=2),
    }
    batch = with_media(**{name: media[name] for name in names})
    found = module.encode(batch)["control"]
    pipe = module.pipeline()
    video: Any = images(media["control"]) if "control" in names else None
    if names == ("mask",):  # inpainting of the clip itself, with the generated area in medium gray
        hidden = (batch.normalized(torch.float32) * (media["mask"] == 0) + 1) / 2
        video = hidden[0].transpose(0, 1)[None]
    frames, mask, references = pipe.preprocess_conditions(
        video,
        images(media["mask"]) if "mask" in names else None,
        images(media["reference"])[0] if "reference" in names else None,
        1,
        *(SIZE[1], SIZE[2], SIZE[0]),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    expected = [pipe.prepare_video_latents(frames, mask, references), pipe.prepare_masks(mask, references)]
    torch.testing.assert_close(found, torch.cat(expected, dim=1), rtol=1e-4, atol=1e-4)


def test_vace_trains_and_samples_with_and_without_references(tmp_path: Path) -> None:
    module = built("wan-vace", tmp_path, sample_steps=2, guidance=2.0)
    control, reference = pixels(1, 3, *SIZE, seed=1), pixels(1, 3, 1, *SIZE[1:], seed=2)
    made = []
    for media in ({"control": control}, {"control": control, "reference": reference}):
        batch = with_media(**media)
        ready = with_encoded(batch, module.encode(batch))
        loss = module(ready)["loss"]
        loss.mean().backward()
        assert all(one.grad is not None and one.grad.any() for one in module.transformer.vace_blocks.parameters())
        made.append(module.sample(ready))
        assert made[-1].shape == (1, 3, *SIZE)
    assert not torch.equal(*made)


def test_inputs_that_do_not_fit_name_the_remedy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = built("wan-vace", tmp_path)
    with pytest.raises(ConfigError, match="mask has values up to 1, but a mask must be white"):
        module.encode(with_media(mask=mask_of(16).clamp(max=1)))
    with pytest.raises(ConfigError, match=r"control has shape \(1, 3, 1, 32, 48\).*--media video:control=COLUMN"):
        module.encode(with_media(control=pixels(1, 3, 1, 32, 48, seed=1)))
    lacking = with_media(reference=pixels(1, 2, 3, 1, 32, 48, seed=1))
    lacking = lacking.with_fields({"media_present": {"reference": torch.tensor([[True, False]])}})
    with pytest.raises(ConfigError, match="lacks images for the conditioning input reference"):
        module.encode(lacking)
    with caplog.at_level(logging.WARNING):
        module.encode(make_batch(SIZE))
    assert "trains as a text-to-video model; to train with conditions, shard with --media control=COLUMN" in caplog.text


def test_a_sample_without_an_optional_input_is_trained_without_it(tmp_path: Path) -> None:
    """The control video is replaced by zeros, and the model keeps no pixel."""
    module = built("wan-vace", tmp_path)
    absent = {name: torch.zeros(1, dtype=torch.bool) for name in ("control", "mask")}
    media = {
        "control": torch.zeros(1, 3, *SIZE, dtype=torch.uint8),
        "mask": torch.zeros(1, 1, *SIZE, dtype=torch.uint8),
    }
    found = module.encode(with_media(**media).with_fields({"media_present": absent}))["control"]
    assert torch.equal(found, module.encode(make_batch(SIZE, ("a red bike",)))["control"])


def test_control_videos_of_cogvideox_are_encoded_as_in_its_pipeline(tmp_path: Path) -> None:
    """The loss is the velocity error, as in scripts/cogvideox_fun/train_control.py of VideoX-Fun at 199a43b."""
    module = built("cogvideox-fun", tmp_path, sample_steps=2, guidance=2.0)
    size = (9, 32, 48)
    control = pixels(1, 3, *size, seed=1)
    batch = make_batch(size, ("a red bike",))
    with pytest.raises(ConfigError, match="no `control` conditioning input.*--media control=COLUMN"):
        module.encode(batch)
    batch = add_media(batch, control=control)
    ready = with_encoded(batch, module.encode(batch))
    pipe = module.pipeline()
    frames = pipe.video_processor.preprocess_video([images(control)], *size[1:])
    torch.testing.assert_close(ready.control, pipe.prepare_control_latents(None, frames)[1], rtol=1e-4, atol=1e-4)
    drawn, scheduler = module.draw(ready), module.scheduler
    clean, noise = (x.transpose(1, 2) for x in (ready.latents, drawn.noise))
    step = (drawn.times * 1000).long()
    out = module.transformer(
        hidden_states=torch.cat([scheduler.add_noise(clean, noise, step), ready.control.transpose(1, 2)], dim=2),
        encoder_hidden_states=ready.prompt_embeds,
        timestep=step,
        image_rotary_emb=pipe._prepare_rotary_positional_embeddings(*size[1:], clean.shape[1], torch.device("cpu")),
        return_dict=False,
    )[0]
    expected = (out - scheduler.get_velocity(clean, noise, step)).double().square().mean()
    torch.testing.assert_close(module(ready)["loss"][0].double(), expected, rtol=1e-5, atol=0)
    assert module.sample(ready).shape == (1, 3, *size)


def test_a_batch_without_captions_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = built("wan2.1", tmp_path)
    module.encode(make_batch(SIZE, ("a red bike", "")))
    assert "caption" not in caplog.text
    for _ in range(2):
        module.encode(make_batch(SIZE, ("", "")))
    assert caplog.text.count("no sample in a batch (for example, 0-0, 0-1) has a caption") == 1
