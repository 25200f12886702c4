"""Inputs of a plan: a cluster, a model and its profile, and their files."""
