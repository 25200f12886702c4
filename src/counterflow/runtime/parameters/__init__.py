"""The parameters: gradients and their sums, updates, and the versions of schemes without a flush."""
