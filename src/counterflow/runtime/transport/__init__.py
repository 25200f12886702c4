"""How tensors travel between workers; ``kinds.py`` lists the ways."""
