"""Which schedule, depth, width and micro-batch to use: cluster, model costs, closed forms, search."""
