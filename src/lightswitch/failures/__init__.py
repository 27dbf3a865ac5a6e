"""Failures and preemption of runs: mistakes and bugs, the save before the end, the watchdog, and the crash report."""
