"""Schedules compared: bubble, memory, bound, speed of the tools themselves, and the lists of torch."""
