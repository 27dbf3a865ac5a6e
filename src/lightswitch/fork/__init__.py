"""Creation of a separate project (a fork) from a checkout of lightswitch, and updates of its engine."""
