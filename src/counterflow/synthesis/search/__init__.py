"""Local moves, evaluated by compiled plays."""
