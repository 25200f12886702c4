"""Orders that repeat a block: search for blocks, unrolling, squeezing."""
