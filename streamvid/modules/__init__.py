"""Operations on a trainable `nn.Module`: weights, LoRA, FP8, activation checkpointing, optimizer, encoding.

The package imports nothing above the loader and does not use accelerate. Its libraries are torch, safetensors, rich
(to format sizes) and, on demand, peft.
Reading order: config, build (the whole recipe), factory, weight_files, weights, lora, activation_checkpointing, fp8,
optimizer, saving, summary; then encoding and encode_dataset for precomputed features. parts finds submodules by name.
"""
