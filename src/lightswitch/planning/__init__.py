"""Estimate a run before it starts: memory, arithmetic, communication, and the strategies that fit.

simulation.py runs the real strategy code for one rank on fake tensors. The other modules compute from the events that
ledger.py records.
"""
