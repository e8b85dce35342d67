"""Operations on any `nn.Module` that trains: weights, LoRA, fp8, activation checkpointing, optimizer, encoding.

Imports nothing above the loader; torch, safetensors, rich's sizes, peft (when asked for), and no accelerate.
Reading order: config, build (the whole recipe), factory, weight_files, weights, lora, activation_checkpointing, fp8,
optimizer, saving, summary; then encoding and encode_dataset for precomputed features. parts.py names submodules.
"""
