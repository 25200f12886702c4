"""Integrations with trainers that people already use, with a pipeline underneath.

Each system has its own package and is imported only there. No other room imports this one.
"""
