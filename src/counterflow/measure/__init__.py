"""What things cost here: stages, ops, layers, links and the machine, measured with the runtime.

What is measured is told in seconds and bytes. Nothing here knows the planner or a config: ``train.profiling``
makes the planner's files of it. What a layer costs without running it is guessed in ``runtime.estimates``.
"""
