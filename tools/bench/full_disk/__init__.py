"""A disk that becomes full in one of the last writes of `pipepart train`: a checkpoint that loads is always there."""
