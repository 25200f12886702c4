"""What people have already: their trainers, with a pipeline underneath.

A sub-room for each system, which is imported only there. Nothing else in Counterflow knows this room.
"""
