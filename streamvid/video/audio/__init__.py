"""Audio of clips: selected samples at a requested rate, an index of packets, and facts. Exact to the sample."""
