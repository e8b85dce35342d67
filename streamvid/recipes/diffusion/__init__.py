"""Shared parts of the recipes of video diffusion models: model folders, latents, texts, times, losses, samples.

    encode   video ─► VAE ─► normalized latents        text ─► the pipeline's `encode_prompt` ─► its outputs by name
    forward  latents, noise and times from the sample's seed ─► transformer ─► loss per sample
    sample   the family's pipeline of diffusers, built from the children of the training module

Reading order: training (the module), config (its options), folder, single_file, latents, inputs (control videos, masks,
references), audio, times, losses.
"""
