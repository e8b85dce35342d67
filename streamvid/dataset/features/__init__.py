"""Precomputed features: tensors made from samples once and stored in shards of their own (sidecars)."""
