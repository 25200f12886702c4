"""From the costs of layers to those of stages and devices: seconds, bytes, sums."""
