"""Pipeline-parallel training for any PyTorch model."""
