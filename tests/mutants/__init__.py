"""Faults that were fixed once, put back one at a time, to measure what the suite catches."""
