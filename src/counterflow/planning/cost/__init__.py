"""From a layer's costs to those of stages and devices: seconds, bytes, sums."""
