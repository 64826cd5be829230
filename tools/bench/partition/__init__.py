"""Bench of the partitioner on published graphs and on large ones."""
