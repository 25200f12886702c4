"""Is it right? The pipeline's numbers against those of one process."""
