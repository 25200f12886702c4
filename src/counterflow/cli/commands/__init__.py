"""One file per command, which parses, calls one function and prints."""
