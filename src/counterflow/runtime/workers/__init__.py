"""The workers of a run: how they start, find each other, and notice that one has failed."""
