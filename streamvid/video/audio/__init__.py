"""Audio of clips, exact to the sample: windows at a requested rate, a packet index, and measured properties."""
