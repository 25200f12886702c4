"""The program: what an action is, how lowering makes the lists, and how they are played without time."""
