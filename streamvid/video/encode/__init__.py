"""Encoding of bucket-native clips and images, verified frame by frame."""
