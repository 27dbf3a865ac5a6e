"""Global batch, sample order and position in training, independent of the world size.

plan.py does the arithmetic without importing torch; callback.py applies the rest to a Lightning run.
"""
