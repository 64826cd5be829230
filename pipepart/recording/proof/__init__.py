"""The proof of a recording and of its chunks: outputs, buffers and gradients are those of the model."""
