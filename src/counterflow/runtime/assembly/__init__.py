"""What a pipeline is put together from: the model cut into stages, this worker's stages, and their runner."""
