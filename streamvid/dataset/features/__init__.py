"""Precomputed features: tensors of each sample, stored in separate shards. Read sidecar.py, then writer.py."""
