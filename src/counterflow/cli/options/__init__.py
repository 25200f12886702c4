"""From a user's text to arguments of the library: flags, schedules by name or file, and messages in terms of
flags.
"""
