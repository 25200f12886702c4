"""Messages between workers; ``kinds.py`` lists the transports."""
