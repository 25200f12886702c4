"""The best order for a workload and costs, with a bound."""
