"""List scheduling and local moves, over compiled plays."""
