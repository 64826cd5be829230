"""Recordings as programs: emitted as code, run op by op, and split into chunks."""
