"""The command line: one command per file; each parses options, calls the library and prints."""
