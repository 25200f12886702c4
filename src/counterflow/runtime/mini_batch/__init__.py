"""The mini-batch of one step: its samples, its micro-batches and its losses."""
