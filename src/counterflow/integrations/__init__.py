"""Integrations with trainers that people already use, and conversions of other projects' files.

Each system has its own package and is imported only there. No other room imports this one, except the command
line.
"""
