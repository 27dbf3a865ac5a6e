"""Runs beside one another: their curves, speed, memory, time by phase of a step, and what differs in their configs."""
