"""Python state of a model: names, snapshots, places that a run reads, and changes that a run makes.

Knows modules, attributes, variables and the places of values. Does not know graphs, except to explain a value that a model
keeps.
"""
