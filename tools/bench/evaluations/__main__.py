"""`python -m tools.bench.evaluations`: 50 batches of 8 micro-batches on 4 sleeping stages, in a series and one by one."""

import argparse

from tools.bench.evaluations.measure import evaluations

if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m tools.bench.evaluations", description=__doc__).parse_args()
    evaluations()
