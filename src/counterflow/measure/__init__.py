"""What things cost here: stages, ops, layers, links and the machine, measured with the runtime.

What is measured is told in seconds and bytes, and as records for the planner (``profile``, ``cluster``);
nothing here knows more of the planner, nor a config. What layers cost without running them is guessed in
``runtime.stages.estimates``.
"""
