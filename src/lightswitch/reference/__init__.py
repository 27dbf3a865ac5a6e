"""What can be typed and configured, read from the config folder and from the code that it names."""
