"""Check of a module: compares short runs of it between strategies and devices, and across a resume."""
