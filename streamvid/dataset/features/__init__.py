"""Precomputed features: tensors made once per sample, in shards of their own. Read sidecar.py, then writer.py."""
