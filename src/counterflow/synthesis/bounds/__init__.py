"""Lower bounds, and their reasons."""
