"""Folders of tiny diffusers pipelines with random weights: the real classes, small enough for a CPU.

make_model("wan2.1", folder)   # writes model_index.json and one subfolder per component
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

WORDS = ("a", "the", "red", "blue", "bike", "car", "cat", "dog", "street", "at", "night", "in", "day", "with", "on")


def make_tokenizer(folder: Path, max_length: int = 512) -> Any:
    """Build a tokenizer of whole words with T5's special tokens: </s> ends each text, and <pad> is 0."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "</s>", "<unk>"]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*special, *WORDS])}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=max_length
    )
    made.save_pretrained(folder)
    return made


def t5_config(kind: str = "umt5") -> dict[str, Any]:
    return {
        "vocab_size": 64,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 2,
        "feed_forward_proj": "gated-gelu",
    }


def shake(module: torch.nn.Module) -> Any:
    """Add noise to all parameters, so that none is zero, no symmetry is exact, and every weight affects the output."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.02)
    return module


def wan_vae(**changes: Any) -> Any:
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        **{
            "base_dim": 4,
            "z_dim": 16,
            "dim_mult": [1, 1, 1, 1],
            "num_res_blocks": 1,
            "temperal_downsample": [False, True, True],
            **changes,
        }
    )


def wan_transformer(**changes: Any) -> Any:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        **{
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 16,
            "out_channels": 16,
            "text_dim": 16,
            "freq_dim": 32,
            "ffn_dim": 48,
            "num_layers": 2,
            "rope_max_seq_len": 64,
            **changes,
        }
    )


def wan_text(folder: Path) -> dict[str, Any]:
    from transformers import UMT5Config, UMT5EncoderModel

    return {
        "tokenizer": make_tokenizer(folder / "own_tokenizer"),
        "text_encoder": UMT5EncoderModel(UMT5Config(**t5_config())),
    }


def wan(folder: Path) -> Any:
    from diffusers import UniPCMultistepScheduler, WanPipeline

    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    return WanPipeline(vae=wan_vae(), scheduler=scheduler, transformer=shake(wan_transformer()), **wan_text(folder))


def wan_2_2(folder: Path) -> Any:
    """Build a model with two experts, like A14B."""
    from diffusers import UniPCMultistepScheduler, WanPipeline

    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    experts = {"transformer": shake(wan_transformer()), "transformer_2": shake(wan_transformer())}
    return WanPipeline(vae=wan_vae(), scheduler=scheduler, boundary_ratio=0.875, **experts, **wan_text(folder))


def wan_2_2_5b(folder: Path) -> Any:
    """Build a model with one timestep per token, like TI2V-5B."""
    from diffusers import UniPCMultistepScheduler, WanPipeline

    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0)
    return WanPipeline(
        vae=wan_vae(),
        scheduler=scheduler,
        transformer=shake(wan_transformer()),
        expand_timesteps=True,
        **wan_text(folder),
    )


def wan_2_2_i2v(folder: Path) -> Any:
    """Build a model with two experts that are given the first frame but no CLIP states, like I2V A14B."""
    from diffusers import UniPCMultistepScheduler, WanImageToVideoPipeline

    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    experts = {name: shake(wan_transformer(in_channels=36)) for name in ("transformer", "transformer_2")}
    return WanImageToVideoPipeline(
        vae=wan_vae(), scheduler=scheduler, boundary_ratio=0.9, **experts, **wan_text(folder)
    )


def wan_vace(folder: Path) -> Any:
    from diffusers import UniPCMultistepScheduler, WanVACEPipeline, WanVACETransformer3DModel

    transformer = WanVACETransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        text_dim=16,
        freq_dim=32,
        ffn_dim=48,
        num_layers=2,
        rope_max_seq_len=64,
        vace_layers=[0, 1],
    )
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    return WanVACEPipeline(vae=wan_vae(), scheduler=scheduler, transformer=shake(transformer), **wan_text(folder))


def wan_i2v(folder: Path) -> Any:
    from diffusers import UniPCMultistepScheduler, WanImageToVideoPipeline
    from transformers import CLIPVisionConfig, CLIPVisionModel

    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    return WanImageToVideoPipeline(
        vae=wan_vae(),
        scheduler=scheduler,
        transformer=shake(wan_transformer(in_channels=36, image_dim=16, added_kv_proj_dim=24)),
        image_encoder=CLIPVisionModel(vision),
        image_processor=clip_processor(16),
        **wan_text(folder),
    )


def t5_text(folder: Path) -> dict[str, Any]:
    from transformers import T5Config, T5EncoderModel

    return {
        "tokenizer": make_tokenizer(folder / "own_tokenizer"),
        "text_encoder": T5EncoderModel(T5Config(**t5_config())),
    }


def ltx(folder: Path) -> Any:
    from diffusers import (
        AutoencoderKLLTXVideo,
        FlowMatchEulerDiscreteScheduler,
        LTXPipeline,
        LTXVideoTransformer3DModel,
    )

    vae = AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
    )
    vae.latents_mean.copy_(torch.linspace(-0.2, 0.2, 8))
    vae.latents_std.copy_(torch.linspace(0.5, 1.5, 8))
    transformer = LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=12,
        cross_attention_dim=24,
        num_layers=2,
        caption_channels=16,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.95,
        max_shift=2.05,
        base_image_seq_len=1024,
        max_image_seq_len=4096,
        shift_terminal=0.1,
    )
    return LTXPipeline(scheduler=scheduler, vae=vae, transformer=shake(transformer), **t5_text(folder))


def ltx_2(folder: Path) -> Any:
    import diffusers
    from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vae = diffusers.AutoencoderKLLTX2Video(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 16, 32),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    )
    vae.latents_mean.copy_(torch.linspace(-0.2, 0.2, 8))
    vae.latents_std.copy_(torch.linspace(0.5, 1.5, 8))
    audio_vae = diffusers.AutoencoderKLLTX2Audio(
        base_channels=8, ch_mult=(1, 1, 1), num_res_blocks=1, latent_channels=2, mel_bins=16, resolution=32
    )
    transformer = diffusers.LTX2VideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=12,
        cross_attention_dim=24,
        audio_in_channels=8,
        audio_out_channels=8,
        audio_num_attention_heads=2,
        audio_attention_head_dim=8,
        audio_cross_attention_dim=16,
        num_layers=2,
        caption_channels=16,
        rope_double_precision=False,
    )
    text = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": 64,
    }
    vision = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 16,
        "patch_size": 8,
    }
    gemma = Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        boi_token_index=61,
        eoi_token_index=62,
        image_token_index=63,
    )
    connectors = LTX2TextConnectors(
        caption_channels=16,
        text_proj_in_factor=3,
        video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=8,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=4,
        audio_connector_num_attention_heads=2,
        audio_connector_attention_head_dim=8,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=4,
        rope_double_precision=False,
    )
    vocoder = LTX2Vocoder(
        in_channels=32,
        hidden_channels=8,
        upsample_kernel_sizes=[4],
        upsample_factors=[2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1]],
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, shift_terminal=0.1
    )
    return diffusers.LTX2Pipeline(
        scheduler=scheduler,
        vae=vae,
        audio_vae=audio_vae,
        text_encoder=Gemma3ForConditionalGeneration(gemma),
        tokenizer=make_tokenizer(folder / "own_tokenizer", 1024),
        connectors=connectors,
        transformer=shake(transformer),
        vocoder=vocoder,
    )


def mochi(folder: Path) -> Any:
    from diffusers import AutoencoderKLMochi, FlowMatchEulerDiscreteScheduler, MochiPipeline, MochiTransformer3DModel

    vae = AutoencoderKLMochi(
        latent_channels=12,
        encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32),
        layers_per_block=(1, 1, 1, 1, 1),
    )
    transformer = MochiTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        pooled_projection_dim=16,
        text_embed_dim=16,
        time_embed_dim=16,
        in_channels=12,
    )
    return MochiPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
        vae=vae,
        transformer=shake(transformer),
        force_zeros_for_empty_prompt=True,
        **t5_text(folder),
    )


def cog_vae(**changes: Any) -> Any:
    from diffusers import AutoencoderKLCogVideoX

    return AutoencoderKLCogVideoX(
        **{
            "block_out_channels": (8, 8, 8, 8),
            "latent_channels": 4,
            "layers_per_block": 1,
            "norm_num_groups": 4,
            "down_block_types": ("CogVideoXDownBlock3D",) * 4,
            "up_block_types": ("CogVideoXUpBlock3D",) * 4,
            **changes,
        }
    )


def cog(folder: Path, kind: str = "CogVideoXPipeline", vae: Any = None, **changes: Any) -> Any:
    import diffusers

    transformer = diffusers.CogVideoXTransformer3DModel(
        **{
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 8,
            "text_embed_dim": 16,
            "num_layers": 2,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 9,
            "max_text_seq_length": 16,
            "use_rotary_positional_embeddings": True,
            **changes,
        }
    )
    scheduler = diffusers.CogVideoXDDIMScheduler(
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        snr_shift_scale=1.0,
        beta_schedule="scaled_linear",
        timestep_spacing="trailing",
        set_alpha_to_one=True,
    )
    return getattr(diffusers, kind)(
        vae=vae or cog_vae(), scheduler=scheduler, transformer=shake(transformer), **t5_text(folder)
    )


def cog_2b(folder: Path) -> Any:
    """Build a model without rotary positions, like CogVideoX 2B."""
    return cog(folder, use_rotary_positional_embeddings=False)


def cog_i2v(folder: Path) -> Any:
    return cog(folder, "CogVideoXImageToVideoPipeline", in_channels=8)


def cog_fun(folder: Path) -> Any:
    """Build a model that receives a control video in addition to the noisy latents."""
    return cog(folder, "CogVideoXFunControlPipeline", in_channels=8)


def cog_1_5(folder: Path) -> Any:
    return cog(folder, patch_size_t=2, patch_bias=False)


def cog_1_5_i2v(folder: Path) -> Any:
    vae = cog_vae(invert_scale_latents=True)
    changes = {"patch_size_t": 2, "patch_bias": False, "in_channels": 8, "ofs_embed_dim": 8}
    return cog(folder, "CogVideoXImageToVideoPipeline", vae, **changes)


def hunyuan(
    folder: Path, kind: str = "HunyuanVideoPipeline", more: dict[str, Any] | None = None, **changes: Any
) -> Any:
    """Build HunyuanVideo. more: components of the pipeline that replace the default ones."""
    import diffusers
    from transformers import CLIPTextConfig, CLIPTextModel, LlamaConfig, LlamaModel

    vae = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("HunyuanVideoDownBlock3D",) * 4,
        up_block_types=("HunyuanVideoUpBlock3D",) * 4,
    )
    transformer = diffusers.HunyuanVideoTransformer3DModel(
        **{
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 10,
            "num_layers": 1,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "text_embed_dim": 16,
            "pooled_projection_dim": 8,
            "rope_axes_dim": (2, 4, 4),
            **changes,
        }
    )
    llama = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, vocab_size=64, pad_token_id=0
    )
    clip = CLIPTextConfig(
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=64,
        projection_dim=8,
        eos_token_id=1,
        bos_token_id=2,
    )
    parts = {
        "text_encoder": LlamaModel(llama),
        "tokenizer": make_tokenizer(folder / "own_tokenizer"),
        "transformer": shake(transformer),
        "vae": vae,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        "text_encoder_2": CLIPTextModel(clip),
        "tokenizer_2": make_tokenizer(folder / "own_tokenizer_2", 77),
    }
    return getattr(diffusers, kind)(**{**parts, **(more or {})})


def clip_processor(size: int) -> Any:
    from transformers import CLIPImageProcessor

    sides = {"height": size, "width": size}
    return CLIPImageProcessor(size=sides, crop_size=sides)


def llava(folder: Path) -> dict[str, Any]:
    """Build a text encoder with 24 x 24 image patches, and a tokenizer whose template has as many tokens as the real
    one: 103 before the text, of which the image is the sixth."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        PreTrainedTokenizerFast,
    )

    special = ["<pad>", "<unk>", "<image>", "<|end_header_id|>", "<|start_header_id|>", "<|eot_id|>"]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*special, *WORDS])}, unk_token="<unk>"))
    pieces = Regex(r"<\|\w+\|>|<image>|\n|\w+|[^\w\s]")
    words.pre_tokenizer = pre_tokenizers.Split(pieces, behavior="removed", invert=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>")
    tokenizer.save_pretrained(folder / "own_tokenizer")
    vision = CLIPVisionConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=1, image_size=48, patch_size=2
    )
    text = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, vocab_size=64, pad_token_id=0
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=2, pad_token_id=0)
    return {
        "text_encoder": LlavaForConditionalGeneration(config),
        "tokenizer": tokenizer,
        "image_processor": clip_processor(48),
    }


def hunyuan_i2v(folder: Path) -> Any:
    """Build a model that receives the first frame in addition to the noisy latents."""
    changes = {"in_channels": 9, "image_condition_type": "latent_concat", "guidance_embeds": False}
    return hunyuan(folder, "HunyuanVideoImageToVideoPipeline", llava(folder), **changes)


def hunyuan_i2v_replace(folder: Path) -> Any:
    """Build a model in which the first frame replaces the first noisy latents."""
    return hunyuan(folder, "HunyuanVideoImageToVideoPipeline", llava(folder), image_condition_type="token_replace")


def hunyuan_1_5(folder: Path, kind: str = "HunyuanVideo15Pipeline", **more: Any) -> Any:
    """Build HunyuanVideo 1.5. more: additional components of the pipeline."""
    import diffusers
    from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel, T5Config, T5EncoderModel

    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4,
        block_out_channels=(16, 16, 16, 16, 16),
        layers_per_block=1,
    )
    transformer = diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=10,
        num_layers=1,
        num_refiner_layers=1,
        text_embed_dim=16,
        text_embed_2_dim=16,
        image_embed_dim=8,
        rope_axes_dim=(2, 4, 4),
        task_type="i2v" if more else "t2v",
        target_size=32,  # side of the square whose area an image is scaled to
    )
    text = Qwen2_5_VLTextConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
        rope_scaling={"type": "mrope", "mrope_section": [1, 1, 2]},
    )
    tokenizer = make_tokenizer(folder / "own_tokenizer", 2000)
    # The template has as many tokens before the text as the real one, and at least one after it.
    before = "{{ 'the ' * 108 if m['role'] == 'system' else m['content'] }}"
    tokenizer.chat_template = f"{{% for m in messages %}}{before}{{% endfor %}} assistant"
    return getattr(diffusers, kind)(
        text_encoder=Qwen2_5_VLTextModel(text),
        tokenizer=tokenizer,
        transformer=shake(transformer),
        vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        text_encoder_2=T5EncoderModel(T5Config(**t5_config())),
        tokenizer_2=make_tokenizer(folder / "own_tokenizer_2"),
        guider=diffusers.ClassifierFreeGuidance(),
        **more,
    )


def hunyuan_1_5_i2v(folder: Path) -> Any:
    from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

    vision = SiglipVisionConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, image_size=16, patch_size=8
    )
    return hunyuan_1_5(
        folder,
        "HunyuanVideo15ImageToVideoPipeline",
        image_encoder=SiglipVisionModel(vision),
        feature_extractor=SiglipImageProcessor(size={"height": 16, "width": 16}),
    )


MODELS: dict[str, Callable[[Path], Any]] = {
    "wan2.1": wan,
    "wan2.1-i2v": wan_i2v,
    "wan2.2": wan_2_2,
    "wan2.2-i2v": wan_2_2_i2v,
    "wan2.2-5b": wan_2_2_5b,
    "wan-vace": wan_vace,
    "ltx-video": ltx,
    "ltx-2": ltx_2,
    "mochi": mochi,
    "cogvideox": cog,
    "cogvideox-2b": cog_2b,
    "cogvideox-i2v": cog_i2v,
    "cogvideox1.5": cog_1_5,
    "cogvideox1.5-i2v": cog_1_5_i2v,
    "hunyuanvideo": hunyuan,
    "hunyuanvideo-i2v": hunyuan_i2v,
    "hunyuanvideo-replace-i2v": hunyuan_i2v_replace,
    "hunyuanvideo1.5": hunyuan_1_5,
    "hunyuanvideo1.5-i2v": hunyuan_1_5_i2v,
}

#: Models whose recipes need a dataset with more than clips and captions.
WITH_INPUTS: dict[str, Callable[[Path], Any]] = {
    "ltx-2-audio": ltx_2,
    "cogvideox-fun": cog_fun,
}


def make_model(name: str, folder: Path, seed: int = 0) -> Path:
    """Write the folder of a tiny pipeline, which depends only on the name and the seed."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipe = {**MODELS, **WITH_INPUTS}[name](folder)
    pipe.save_pretrained(folder)
    return folder


if __name__ == "__main__":  # for manual use: python -m tests.recipes.tiny wan2.1 FOLDER
    print(json.dumps(sorted(str(one) for one in make_model(sys.argv[1], Path(sys.argv[2])).iterdir())))
