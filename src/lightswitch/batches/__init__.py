"""Global batch, sample order, and position in training: the same run at any world size.

plan.py is arithmetic and imports no torch; callback.py imposes the rest on a Lightning run from outside.
"""
