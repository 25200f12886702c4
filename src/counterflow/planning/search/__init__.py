"""Which configurations there are, what bounds them, and the search for the best."""
