"""Data of the main job: a text as bytes, and mini-batches of it. Schedules and models are not imported."""
