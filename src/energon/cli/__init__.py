"""The command line: one command per file; each parses options, calls a room and prints."""
