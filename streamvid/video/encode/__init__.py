"""Encoding bucket-native clips and images, which are verified frame by frame."""
