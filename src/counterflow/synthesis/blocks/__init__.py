"""Orders that repeat a block: found, unrolled, squeezed."""
