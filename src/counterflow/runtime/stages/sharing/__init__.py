"""Python objects that layers of several stages share, and what each stage's code does with them."""
