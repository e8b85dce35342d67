"""Which frames, which crop, which caption a delivery shows."""
