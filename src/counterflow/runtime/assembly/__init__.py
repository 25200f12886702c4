"""Assembly of a pipeline: the model cut into stages, this worker's stages, and their runner."""
