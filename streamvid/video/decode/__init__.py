"""Decoding selected frames from files, and from clips with a packet index."""
