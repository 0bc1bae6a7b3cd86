"""The command line: a module for each command, and what several of them share. Each imports only what it needs."""
