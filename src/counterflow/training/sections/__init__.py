"""The tables of a config: a record each, with every key's type, default, meaning and legal values."""
