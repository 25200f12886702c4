"""What a plan is made from: a cluster, a model and its profile, and their files."""
