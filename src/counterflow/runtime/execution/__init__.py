"""Runs a worker's program: the interpreter, and the runners that give it what a step computes."""
