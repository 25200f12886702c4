"""The model sources that come with Counterflow: one file per source, with its ``SOURCE``."""
