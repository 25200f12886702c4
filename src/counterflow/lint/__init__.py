"""The linter of call lists: do the sends and receives of any system end, and which change ends a hang."""
