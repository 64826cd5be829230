"""Evaluations that keep the pipeline full over batches, beside evaluations that drain it after each."""
