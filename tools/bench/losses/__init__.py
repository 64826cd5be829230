"""Losses of the whole batch over all forms, schedules and shapes, against one process."""
