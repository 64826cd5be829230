"""What tests share: real processes with a time limit, and small models."""
