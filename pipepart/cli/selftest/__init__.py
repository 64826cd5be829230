"""Self-test: `pipepart selftest` checks the devices, transports and schedules of the machine it runs on.

::

    selftest_run      the command: the parts, one after the other
       |
    device_checks     memory and products of each device
    message_checks    transports with every dtype
    speeds            devices, links, all-reduce -> cluster_file
    transparency      small_models on all schedules against one device
    ending            a rank that is killed, a rank that raises
       |
    crew              the processes: many checks by one crew, each with a time limit
    verdicts          results of checks
    selftest_report   lines in the terminal and selftest.json
"""

from __future__ import annotations

from pipepart.cli.selftest.selftest_run import selftest

__all__ = ["selftest"]
