"""Mutated files and drawn options for every reader and every option: only a `PipepartError` may come out."""
