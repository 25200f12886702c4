"""One file a command: it parses, calls one function and prints."""
