"""Help and schemas, made from the config folder and from the code that it names."""
