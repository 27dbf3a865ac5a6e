"""A project of one's own, made from a checkout of lightswitch, and a newer engine put into it."""
