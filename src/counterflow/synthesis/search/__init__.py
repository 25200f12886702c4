"""Local moves, over compiled plays."""
