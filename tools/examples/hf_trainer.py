#!/usr/bin/env python3
"""Training with Hugging Face's Trainer: checkpoints contain the loader's state, so that a resume continues the epoch.

    python hf_trainer.py DATASET --output run --steps 20
    python hf_trainer.py DATASET --output run --steps 40      # resumes from run/checkpoint-20

`ignore_data_skip=True` keeps the Trainer from skipping batches: the loader itself starts at its position.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import streamvid


class Model(nn.Module):
    """Model that receives the fields of a batch as keyword arguments from the Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Conv3d(3, 3, 3, padding=1)
        self.seen: list[list[str]] = []

    def forward(self, video: Tensor, sample_keys: list[str], **others: Any) -> dict[str, Tensor]:
        self.seen.append(list(sample_keys))
        x = nn.functional.adaptive_avg_pool3d(video.float() / 127.5 - 1, (4, 16, 16))
        return {"loss": (self.net(x) - x).square().mean()}


class LoaderState(TrainerCallback):
    def __init__(self, loader: streamvid.VideoLoader) -> None:
        self.loader = loader

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **others: Any) -> None:
        if state.is_world_process_zero:
            path = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}" / "loader.json"
            path.write_text(json.dumps(self.loader.state_dict()))


class VideoTrainer(Trainer):
    def __init__(self, loader: streamvid.VideoLoader, **arguments: Any) -> None:
        super().__init__(callbacks=[LoaderState(loader)], **arguments)
        self.loader = loader

    def get_train_dataloader(self) -> Any:
        return self.loader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--output", type=Path, default=Path("hf_run"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=1)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = Model()
    settings = TrainingArguments(
        output_dir=str(args.output),
        max_steps=args.steps,
        save_steps=args.steps,
        ignore_data_skip=True,
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=True,
    )
    last = get_last_checkpoint(str(args.output)) if args.output.exists() else None
    with streamvid.VideoLoader(args.dataset, batch_size=args.batch_size, num_epochs=None) as loader:
        if last is not None:
            loader.load_state_dict(json.loads((Path(last) / "loader.json").read_text()))
        done = VideoTrainer(loader, model=model, args=settings).train(last)
    print(json.dumps({"keys": model.seen, "step": done.global_step}))


if __name__ == "__main__":
    main()
