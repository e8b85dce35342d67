"""Precomputed features: tensors encoded from each sample, in separate shards. Read sidecar.py, then writer.py."""
