"""What a run will take, known before it starts: memory, arithmetic, communication, and what fits.

simulation.py runs the strategy's own code for one rank on tensors without data; all else is arithmetic over what
ledger.py has noted.
"""
