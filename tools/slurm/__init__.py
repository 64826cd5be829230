"""A cluster of SLURM on one machine: the real daemons, on hosts that are network namespaces.

    python -m tools.slurm [--nodes N] [COMMAND ...]

starts a cluster, runs a command on its first node (a shell without one), and ends the cluster. `make slurm` installs the
daemons.
"""
