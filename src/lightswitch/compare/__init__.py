"""Compare runs: their curves, speed, memory, time by phase of a step, and config differences."""
