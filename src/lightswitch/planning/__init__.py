"""Estimate a run before it starts: memory, arithmetic, communication, and the strategies that fit.

simulation.py runs a training step on one device with fake tensors, in which repeats.py has equal units run once. The
other modules compute from the events that ledger.py records.
"""
