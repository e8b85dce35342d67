"""Flags and file layouts of other trainers, as configurations of ours. Nothing below the command line imports it.

Reading order: diffsynth (DiffSynth-Studio's flags, one row per flag), diffsynth_data (what its --dataset_base_path
names), dataset_cache (metadata that is sharded on first use).
"""
