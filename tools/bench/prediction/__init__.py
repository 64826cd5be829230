"""The predicted step of the default recipes against the measured one."""
