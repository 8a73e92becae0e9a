"""What `python -m llamagym COMMAND` does: a file for each of the larger commands, and what these share."""
