"""The space of configurations, its bounds, and the search for the best."""
