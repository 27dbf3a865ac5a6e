"""The watchdog over the ranks of a run: if one fails, hangs or is lost, all end soon, with a message that names it.

A thread in each rank talks to the hub in rank 0 over a socket of its own, as the process group's means (a store, a
collective) may block forever just when they are needed. verdict.py holds the rules, as pure functions.
"""
