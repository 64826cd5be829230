"""The arguments of a recorded call: nested containers as flat leaves, and which of them hold the samples."""
