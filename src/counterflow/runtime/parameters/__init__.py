"""The parameters: gradients and their sums, updates, and the versions of asynchronous schemes."""
