"""Translation of other trainers' flags and file layouts into configurations.

Only the command line imports this package.

Reading order: diffsynth (DiffSynth-Studio's flags, one row per flag), diffsynth_data (its --dataset_base_path),
dataset_cache (datasets that are sharded on first use).
"""
