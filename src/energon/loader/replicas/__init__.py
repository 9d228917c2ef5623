"""One loader for the processes of a model replica."""
