"""Every problem of a request that can be known before a process is started. Imports no torch."""
