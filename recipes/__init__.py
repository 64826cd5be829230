"""Training recipes: each one file with its model, its data and its step, and nothing about pipelines in it."""
