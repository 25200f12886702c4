"""Diagnoses of user models: run the whole, run its parts, compare.

A diagnosis drives a model through callables that its caller passes, so it knows no pipeline. It changes
nothing of the model. All comparisons take their tolerances from one table (``tolerances``).
"""
