"""Python state of a model: names, snapshots, places that a run reads, and changes that a run makes.

The package knows modules, attributes, variables and the places of values. It must not know graphs, except to explain a
value that a model keeps.
"""
