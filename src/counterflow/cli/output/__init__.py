"""What commands print with: a console, the models of ``--json``, progress, and tables of several files."""
