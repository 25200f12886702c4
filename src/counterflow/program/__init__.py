"""The program: actions, how lowering makes lists of them, and how the lists are played without time."""
