"""What the caller receives: batches over the ring or on the device."""
