"""The user's own forward as a witness of the pipeline's.

At some steps one unit of the mini-batch also runs through the model's own forward: the real Python code, on
the worker that computes the unit's loss. The owner of a module that has weights runs its calls and returns
the results (``rounds``). The forward uses the step's weights, modes and random draws, and the real loss
function (``model_forward``). Loss and output must equal those that the schedule computes for the unit
(``witness``).

Invariant: a witness leaves weights, buffers, random states and the modules of the user's model as they were.
"""
