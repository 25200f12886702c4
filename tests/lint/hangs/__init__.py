"""Seven public hangs as lists of calls, rebuilt from their threads.

A thread that shows its lists gives them (172668). Of the rest the thread says which calls wait; the lists
around them are those that the named code makes. What a thread does not say is marked as assumed.
"""
