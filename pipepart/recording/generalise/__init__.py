"""Generalisation: from recorded runs at several sizes to one graph in which sizes are free or fixed.

The package knows recorded runs and the sizes of the example. It must not know chunks or proofs.
"""
