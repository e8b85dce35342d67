"""What is done to any torch module: weights, LoRA, fp8, activation checkpointing, optimizer, encoding."""
