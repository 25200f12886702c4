"""The communication plan of a program: its communicators, the order of its calls, and its receive buffers."""
