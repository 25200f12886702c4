"""One stage: its layers, their random draws, and how they compute a second time."""
