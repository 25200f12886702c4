"""Output of commands: a console, the models of ``--json``, progress bars, and tables that several
commands share.
"""
