"""Short runs in a row: each must end with exit code 0 on every rank."""
