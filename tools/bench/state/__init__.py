"""What the guards of the Python state cost: before a step, and while a model is recorded."""
