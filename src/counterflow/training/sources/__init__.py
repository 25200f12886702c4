"""The model sources that come with Counterflow: a file each, with its ``SOURCE``."""
