"""Generalisation: from recorded runs at several sizes to one graph in which sizes are free or fixed.

Knows recorded runs and the sizes of the example. Does not know chunks or proofs.
"""
