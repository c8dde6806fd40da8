"""Functions for the tasks of `bugfix`; read as text."""
