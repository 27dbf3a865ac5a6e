"""Lightning's loops over epochs and batches, with less overhead, and with what a resume and a save need of them."""
