"""The exact method: a model of OR-tools that refutes or finds orders."""
