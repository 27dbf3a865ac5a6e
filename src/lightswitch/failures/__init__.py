"""Failures and preemption of runs: error classification, saving on a signal, the watchdog, and crash reports."""
