"""The watch over the ranks of a run: whichever fails, hangs or is lost, all end soon, and one says which it was.

A thread in each rank beside training talks to the hub, in rank 0, over a socket of its own: the group's own means
(a store, a collective) may block for ever just when they are needed. verdict.py is arithmetic and holds the rules.
"""
