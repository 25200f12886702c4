"""What commands print with: a console, the models of ``--json``, progress bars, and tables that several
commands share.
"""
