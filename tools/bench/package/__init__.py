"""The package as others get it: sdist and wheel in an environment of their own, without the repository and its constraints."""
