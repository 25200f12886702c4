"""Conversions between torchtitan and Counterflow: pipeline keys of a job, and folders of checkpoints.

Neither needs torchtitan itself. No other room but the command line imports this one.
"""
