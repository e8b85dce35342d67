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
    """A tokenizer of whole words, with T5's special tokens: </s> ends each text, and <pad> is 0."""
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
    """No zeros and no exact symmetry, so that every weight has a say."""
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


MODELS: dict[str, Callable[[Path], Any]] = {"wan2.1": wan}


def make_model(name: str, folder: Path, seed: int = 0) -> Path:
    """Write the folder of a tiny pipeline, the same for the same seed."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipe = MODELS[name](folder)
    pipe.save_pretrained(folder)
    return folder


if __name__ == "__main__":  # for trying things out: python -m tests.recipes.tiny wan2.1 FOLDER
    print(json.dumps(sorted(str(one) for one in make_model(sys.argv[1], Path(sys.argv[2])).iterdir())))
