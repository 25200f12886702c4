"""Costs of a pipeline's stages on its workers: their records, inputs to run stages on, and measurement."""
