"""Detection of the launcher, and the rendezvous and handshake of a run's processes."""
