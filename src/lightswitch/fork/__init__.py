"""A project of one's own, made from a checkout of lightswitch, and the engine in it, which can be replaced by a newer."""
