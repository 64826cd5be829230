"""The zoo: tiny versions of the architectures that people train, for trying capture on all of them."""
