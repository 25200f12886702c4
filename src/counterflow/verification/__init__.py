"""Verification: the pipeline's numbers against those of one process."""
