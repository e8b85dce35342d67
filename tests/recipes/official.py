"""Training steps of the families, reimplemented per sample from their official code as a reference for losses.

Each function maps a Case to the loss of one sample. The sources were read at these commits:

- Wan: a-r-r-o-w/finetrainers, finetrainers/models/wan/base_specification.py at 01d612b. For a given first frame and for
  experts: modelscope/DiffSynth-Studio, diffsynth/diffusion/loss.py at 0e6976a. The image-to-video inputs follow
  diffusers 0.42.1, pipelines/wan/pipeline_wan_i2v.py.
- Wan VACE: DiffSynth-Studio, diffsynth/pipelines/wan_video.py (WanVideoUnit_InputVideoEmbedder, WanVideoUnit_VACE) at
  bd640b4a, with the loss of diffsynth/diffusion/loss.py at 0e6976a.
- LTX-Video: finetrainers, finetrainers/models/ltx_video/base_specification.py at 1b23667; the given first frame as in
  Lightricks/LTX-2, packages/ltx-trainer/src/ltx_trainer/training_strategies/flexible.py at 4e277dd.
- LTX-2: the same trainer with `audio: null`.
- CogVideoX: THUDM/CogVideo, finetune/models/cogvideox_i2v/lora_trainer.py at 1789f07 (1.5 and text to video
  differ only in the configuration). Rotary positions follow diffusers 0.42.1, pipelines/cogvideo/pipeline_cogvideox.py.
- HunyuanVideo: finetrainers, finetrainers/models/hunyuan_video/base_specification.py at 03230b8.
  Image to video: Tencent-Hunyuan/HunyuanVideo-I2V, hyvideo/diffusion/flow/transport.py at 1481c1d.
- HunyuanVideo 1.5: Tencent-Hunyuan/HunyuanVideo-1.5, train.py at 995afc6; image to video as at 60783e7.
- Mochi: finetrainers, finetrainers/models/mochi/lora.py at 452546c, and flow_match_target of its trainer.

finetrainers and the diffusers scripts truncate timesteps to integers; here they follow from sigma, as in DiffSynth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One sample: latents and noise (1, C, t, h, w), sigma, encoded texts (1, …), and whether a first frame is given."""

    module: Any
    latents: Tensor
    noise: Tensor
    sigma: float
    fields: Mapping[str, Any]
    first_frame: bool = False

    @property
    def mixed(self) -> Tensor:
        return (1.0 - self.sigma) * self.latents + self.sigma * self.noise

    @property
    def timestep(self) -> Tensor:
        return torch.tensor([self.sigma * 1000.0])


def mse(a: Tensor, b: Tensor) -> float:
    return float(((a.double() - b.double()) ** 2).mean())


def wan(case: Case) -> float:
    text = case.fields["prompt_embeds"]
    text = torch.cat([text, text.new_zeros(1, 512 - text.shape[1], text.shape[2])], dim=1)
    boundary = case.module.folder.index.get("boundary_ratio")
    has_two = hasattr(case.module, "transformer_2")
    model = case.module.transformer_2 if has_two and case.sigma < boundary else case.module.transformer
    x, timestep, others = case.mixed, case.timestep, {}
    target = case.noise - case.latents
    if "condition" in case.fields:
        t, h, w = x.shape[2:]
        mask = torch.cat([torch.ones(1, 1, 4, h, w), torch.zeros(1, 1, 4 * (t - 1), h, w)], dim=2)
        x = torch.cat([x, mask.view(1, t, 4, h, w).transpose(1, 2), case.fields["condition"]], dim=1)
        others["encoder_hidden_states_image"] = case.fields.get("image_embeds")
    if case.module.folder.index.get("expand_timesteps"):
        mask = torch.ones(x.shape[2:])
        if case.first_frame:
            mask[0] = 0
            x = torch.cat([case.latents[:, :, :1], x[:, :, 1:]], dim=2)
        timestep = (mask[:, ::2, ::2] * timestep).flatten()[None]
    out = model(hidden_states=x, timestep=timestep, encoder_hidden_states=text, return_dict=False, **others)[0]
    return mse(out[:, :, 1:], target[:, :, 1:]) if case.first_frame else mse(out, target)


def wan_vace(case: Case) -> float:
    """Compute the loss with one reference image, whose latents precede both the denoised latents and the context."""
    text = case.fields["prompt_embeds"]
    text = torch.cat([text, text.new_zeros(1, 512 - text.shape[1], text.shape[2])], dim=1)
    context = case.fields["control"]
    input_latents = torch.cat([context[:, :16, :1], case.latents], dim=2)
    x = (1.0 - case.sigma) * input_latents + case.sigma * case.noise
    out = case.module.transformer(
        hidden_states=x,
        timestep=case.timestep,
        encoder_hidden_states=text,
        control_hidden_states=context,
        control_hidden_states_scale=torch.ones(2),
        return_dict=False,
    )[0]
    return mse(out, case.noise - input_latents)


def ltx(case: Case) -> float:
    _, c, t, h, w = case.latents.shape
    sigmas = torch.full((1, t * h * w, 1), case.sigma)
    if case.first_frame:
        sigmas[:, : h * w] = 0
    latents, noise = (x.permute(0, 2, 3, 4, 1).reshape(1, -1, c) for x in (case.latents, case.noise))
    rate = float(case.fields["fps"][0])
    out = case.module.transformer(
        hidden_states=(1 - sigmas) * latents + sigmas * noise,
        encoder_hidden_states=case.fields["prompt_embeds"],
        encoder_attention_mask=case.fields["prompt_attention_mask"],
        timestep=sigmas * 1000.0,
        num_frames=t,
        height=h,
        width=w,
        rope_interpolation_scale=[1 / (rate / 8), 32, 32],
        return_dict=False,
    )[0]
    kept = slice(h * w, None) if case.first_frame else slice(None)
    return mse(out[:, kept], (noise - latents)[:, kept])


def ltx2(case: Case) -> float:
    """Compute the loss of LTX-2 without audio: like LTX-Video, but the transformer derives positions from the frame
    rate."""
    _, c, t, h, w = case.latents.shape
    sigmas = torch.full((1, t * h * w, 1), case.sigma)
    if case.first_frame:
        sigmas[:, : h * w] = 0
    latents, noise = (x.permute(0, 2, 3, 4, 1).reshape(1, -1, c) for x in (case.latents, case.noise))
    out = case.module.transformer(
        hidden_states=(1 - sigmas) * latents + sigmas * noise,
        audio_hidden_states=torch.zeros(1, 1, 8),
        encoder_hidden_states=case.fields["video_text"],
        audio_encoder_hidden_states=case.fields["audio_text"],
        encoder_attention_mask=case.fields["text_attention"],
        timestep=sigmas[:, :, 0] * 1000.0,
        audio_timestep=case.timestep,
        sigma=case.timestep,
        num_frames=t,
        height=h,
        width=w,
        fps=float(case.fields["fps"][0]),
        audio_num_frames=1,
        isolate_modalities=True,
        return_dict=False,
    )[0]
    kept = slice(h * w, None) if case.first_frame else slice(None)
    return mse(out[:, kept], (noise - latents)[:, kept])


def cogvideox(case: Case) -> float:
    module, scheduler, config = case.module, case.module.scheduler, case.module.transformer.config
    latent, image = case.latents, case.fields.get("condition")
    if config.patch_size_t is not None:
        latent = torch.cat([latent[:, :, :1].repeat(1, 1, latent.shape[2] % config.patch_size_t, 1, 1), latent], dim=2)
    latent, noise = latent.permute(0, 2, 1, 3, 4), case.noise.permute(0, 2, 1, 3, 4)
    timesteps = torch.tensor([int(case.sigma * 1000)])
    noisy = scheduler.add_noise(latent, noise, timesteps)
    states = noisy
    if image is not None:
        image = image.permute(0, 2, 1, 3, 4)
        padding = image.new_zeros(1, latent.shape[1] - 1, *latent.shape[2:])
        states = torch.cat([noisy, torch.cat([image, padding], dim=1)], dim=2)
    from diffusers import CogVideoXPipeline

    pipe = CogVideoXPipeline(None, None, None, module.transformer, scheduler)
    _, t, _, h, w = latent.shape
    rotary = pipe._prepare_rotary_positional_embeddings(8 * h, 8 * w, t, torch.device("cpu"))
    output = module.transformer(
        hidden_states=states,
        encoder_hidden_states=case.fields["prompt_embeds"],
        timestep=timesteps,
        ofs=None if config.ofs_embed_dim is None else latent.new_full((1,), fill_value=2.0),
        image_rotary_emb=rotary if config.use_rotary_positional_embeddings else None,
        return_dict=False,
    )[0]
    predicted = scheduler.get_velocity(output.double(), noisy.double(), timesteps)
    weight = 1 / (1 - scheduler.alphas_cumprod.double()[timesteps])
    return float((weight.view(-1, 1, 1, 1, 1) * (predicted - latent) ** 2).mean())


def hunyuanvideo(case: Case, x: Tensor | None = None, guidance: float = 1.0, skipped: int = 0) -> float:
    """Compute the loss. x: input of the transformer; skipped: number of latent frames left out of the loss."""
    has_guidance = case.module.transformer.config.guidance_embeds
    out = case.module.transformer(
        hidden_states=case.mixed if x is None else x,
        guidance=case.latents.new_full((1,), guidance) * 1000.0 if has_guidance else None,
        encoder_hidden_states=case.fields["prompt_embeds"],
        encoder_attention_mask=case.fields["prompt_attention_mask"],
        pooled_projections=case.fields["pooled_prompt_embeds"],
        timestep=case.timestep,
        return_dict=False,
    )[0]
    return mse(out[:, :, skipped:], (case.noise - case.latents)[:, :, skipped:])


def hunyuanvideo_i2v(case: Case) -> float:
    condition, xt = case.fields["condition"], case.mixed
    if case.module.transformer.config.image_condition_type == "token_replace":
        return hunyuanvideo(case, torch.cat([condition, xt[:, :, 1:]], dim=2), guidance=6.0, skipped=1)
    repeated = condition.repeat(1, 1, xt.shape[2], 1, 1)
    repeated[:, :, 1:] = 0.0
    mask = torch.ones(1, 1, *xt.shape[2:])
    mask[:, :, 1:] = 0.0
    return hunyuanvideo(case, torch.cat([xt, repeated, mask], dim=1))


def hunyuanvideo15(case: Case) -> float:
    b, c, f, h, w = case.latents.shape
    condition, vision = torch.zeros(b, c + 1, f, h, w), torch.zeros(b, 729, 8)
    if "condition" in case.fields and f > 1:  # images always train as text to video
        condition[:, :-1, :1] = case.fields["condition"]
        condition[:, -1, 0] = 1
        vision = case.fields["image_embeds"]
    out = case.module.transformer(
        hidden_states=torch.cat([case.mixed, condition], dim=1),
        timestep=case.timestep,
        encoder_hidden_states=case.fields["prompt_embeds"],
        encoder_attention_mask=case.fields["prompt_embeds_mask"],
        encoder_hidden_states_2=case.fields["prompt_embeds_2"],
        encoder_attention_mask_2=case.fields["prompt_embeds_mask_2"],
        image_embeds=vision,
        return_dict=False,
    )[0]
    return mse(out, case.noise - case.latents)


def mochi(case: Case) -> float:
    out = case.module.transformer(
        hidden_states=case.mixed,
        encoder_hidden_states=case.fields["prompt_embeds"],
        encoder_attention_mask=case.fields["prompt_attention_mask"],
        timestep=1000 - case.timestep,
        return_dict=False,
    )[0]
    return mse(-out, case.noise - case.latents)


STEPS: Mapping[str, Callable[[Case], float]] = {
    "wan2.1": wan,
    "wan2.1-i2v": wan,
    "wan2.2": wan,
    "wan2.2-i2v": wan,
    "wan2.2-5b": wan,
    "wan-vace": wan_vace,
    "ltx-video": ltx,
    "ltx-2": ltx2,
    "cogvideox": cogvideox,
    "cogvideox-2b": cogvideox,
    "cogvideox-i2v": cogvideox,
    "cogvideox1.5": cogvideox,
    "cogvideox1.5-i2v": cogvideox,
    "hunyuanvideo": hunyuanvideo,
    "hunyuanvideo-i2v": hunyuanvideo_i2v,
    "hunyuanvideo-replace-i2v": hunyuanvideo_i2v,
    "hunyuanvideo1.5": hunyuanvideo15,
    "hunyuanvideo1.5-i2v": hunyuanvideo15,
    "mochi": mochi,
}
