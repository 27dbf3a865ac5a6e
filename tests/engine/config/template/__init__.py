"""A module, data and their configs as lightning-hydra-template has them, on images that are drawn here."""
