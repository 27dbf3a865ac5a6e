"""Faults that were fixed once or that a test file is there to catch, one at a time: what the suite catches."""
