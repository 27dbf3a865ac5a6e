"""Failures and preemption of runs: saving before the end, the watchdog over ranks, and the crash report."""
