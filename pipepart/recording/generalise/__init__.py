"""From several recorded runs to one graph: which numbers follow the sizes of the example, and which are fixed."""
