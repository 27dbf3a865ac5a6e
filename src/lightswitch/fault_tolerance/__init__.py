"""What ends a run before its time, and what is told of it: signals, preemption, failures of ranks."""
