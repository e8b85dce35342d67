"""Number of audio samples that belong to the frames of a bucket."""
