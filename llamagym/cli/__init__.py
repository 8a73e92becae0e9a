"""The commands of `python -m llamagym`, and the functions that they share."""
